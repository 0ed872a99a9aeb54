// What cuBLASLt does with the calls that train/kernels/cublaslt.py makes, computed on a CPU one number at a time: by its
// documentation, matrices by columns, sums in fp32. Two ways are proposed, of which the first is refused.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>

namespace {
enum { FP32 = 0, BF16 = 14 };
enum { GELU_AUX = 160, BIAS_FIRST = 4, DGELU = 192, PLAIN = 1 };

struct Layout { int type; uint64_t rows, columns; int64_t width; };
struct Says {
  int turned[2] = {0, 0}, epilogue = PLAIN;
  const void* bias = nullptr;
  void* kept = nullptr;
  int64_t kept_width = 0;
};
struct Way { uint64_t words[8]; size_t workspace; int status; float waves; int reserved[4]; };

float number(const void* from, int type, int64_t at) {
  if (type == FP32) return static_cast<const float*>(from)[at];
  uint32_t bits = uint32_t(static_cast<const uint16_t*>(from)[at]) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void put(void* to, int type, int64_t at, float value) {
  if (type == FP32) { static_cast<float*>(to)[at] = value; return; }
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  static_cast<uint16_t*>(to)[at] = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

std::map<int, int> computed;  // how many products of each kind

float inner(float x) { return 0.7978845608f * (x + 0.044715f * x * x * x); }
float gelu(float x) { return 0.5f * x * (1 + std::tanh(inner(x))); }
float gelu_slope(float x) {
  float t = std::tanh(inner(x));
  return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}
float at(const void* from, const Layout& as, bool turned, uint64_t row, uint64_t column) {
  return number(from, as.type, turned ? column + row * as.width : row + column * as.width);
}
}  // namespace

extern "C" {
size_t cublasLtGetVersion() { return 1; }
int cublasLtCreate(void** made) { *made = new int; return 0; }
int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns, int64_t width) {
  *made = new Layout{type, rows, columns, width};
  return 0;
}
int cublasLtMatmulDescCreate(void** made, int sums, int scale) {
  *made = new Says;
  return sums == 68 && scale == FP32 ? 0 : 7;
}
int cublasLtMatmulDescSetAttribute(void* says, int which, const void* value, size_t size) {
  auto& said = *static_cast<Says*>(says);
  switch (which) {
    case 3: case 4: std::memcpy(&said.turned[which - 3], value, size); return size == 4 ? 0 : 7;
    case 7: std::memcpy(&said.epilogue, value, size); return size == 4 ? 0 : 7;
    case 8: std::memcpy(&said.bias, value, size); return size == 8 ? 0 : 7;
    case 11: std::memcpy(&said.kept, value, size); return size == 8 ? 0 : 7;
    case 12: std::memcpy(&said.kept_width, value, size); return size == 8 ? 0 : 7;
    default: return 7;
  }
}
int cublasLtMatmulPreferenceCreate(void** made) { *made = new int; return 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulPreferenceDestroy(void* wish) { delete static_cast<int*>(wish); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Way* ways, int* count) {
  std::memset(ways, 0, 2 * sizeof(Way));
  ways[1].words[0] = 1;
  *count = 2;
  return 0;
}
int cublasLtMatmul(void* handle, void* says, const float* alpha, const void* a, void* a_as, const void* b, void* b_as,
                   const float* beta, const void* c, void* c_as, void* d, void* d_as, const uint64_t* way,
                   void* workspace, size_t, void*) {
  const auto& said = *static_cast<Says*>(says);
  const auto &left = *static_cast<Layout*>(a_as), &right = *static_cast<Layout*>(b_as);
  const auto &added = *static_cast<Layout*>(c_as), &out = *static_cast<Layout*>(d_as);
  if (!handle || !workspace || !way[0]) return 15;
  uint64_t depth = said.turned[0] ? left.rows : left.columns;
  if (depth != (said.turned[1] ? right.columns : right.rows)) return 7;
  if ((said.turned[0] ? left.columns : left.rows) != out.rows) return 7;
  if ((said.turned[1] ? right.rows : right.columns) != out.columns) return 7;
  const bool biased = said.epilogue & BIAS_FIRST, keeps = (said.epilogue & ~BIAS_FIRST) == GELU_AUX;
  for (uint64_t column = 0; column < out.columns; ++column)
    for (uint64_t row = 0; row < out.rows; ++row) {
      float sum = 0;
      for (uint64_t k = 0; k < depth; ++k)
        sum += at(a, left, said.turned[0], row, k) * at(b, right, said.turned[1], k, column);
      float value = *alpha * sum;
      if (*beta != 0) value += *beta * number(c, added.type, row + column * added.width);
      if (biased) value += number(said.bias, out.type, row);  // unless its type is told, which it is not
      const int64_t place = row + column * said.kept_width;
      if (keeps) { put(said.kept, BF16, place, value); value = gelu(value); }
      if (said.epilogue == DGELU) value *= gelu_slope(number(said.kept, BF16, place));
      put(d, out.type, row + column * out.width, value);
    }
  ++computed[said.epilogue];
  return 0;
}
int products(int epilogue) { return computed[epilogue]; }
}
