"""How quickly the planner searches: all offers, up to 16,384 accelerators, for a small and a large model."""

import argparse
import resource
import statistics
import time
from pathlib import Path

from common import RESULTS, console, facts, save, show
from slipstream.job.models import DecoderModel
from slipstream.plan.offers import load_offers
from slipstream.plan.search import Splits, Wanted, _layouts, search
from slipstream.plan.work import work_of_decoder

JOBS = {"llama-8b": (512, 15e12), "llama-70b": (1024, 15e12), "llama-405b": (2048, 15e12)}
"""Batch in sequences of 8,192 tokens, and tokens in all."""


def wanted(preset: str) -> Wanted:
    batch, tokens = JOBS[preset]
    model = DecoderModel.model_validate({"kind": "decoder", "preset": preset})
    splits = Splits((1, 2, 4, 8), model.layers, (1, 2, 4), recompute=True)
    work = work_of_decoder(model, 128_256, 8192)
    return Wanted(work, splits, batch, tokens / 8192, optimizer_states=2, precisions=("bf16", "fp16"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="one model, one round")
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.json")
    options = parser.parse_args()
    record = facts()
    start = time.perf_counter()
    offers = load_offers()
    loading = time.perf_counter() - start
    results = []
    for preset in list(JOBS)[: 1 if options.short else None]:
        seconds = []
        for _ in range(1 if options.short else 5):
            _layouts.cache_clear()
            start = time.perf_counter()
            found = search(wanted(preset), offers)
            seconds.append(time.perf_counter() - start)
        middle = statistics.median(seconds)
        results.append(
            {
                "model": preset,
                "seconds": round(middle, 3),
                "layouts": found.evaluated,
                "layouts_per_s": round(found.evaluated / middle),
                "plans": len(found.prospects),
            }
        )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    show(
        f"searching {len(offers):,} offers (read in {loading:.2f} s); {memory / 1e9:.2f} GB at most",
        ("model", "seconds", "layouts", "layouts/s", "plans"),
        [
            (r["model"], f"{r['seconds']:.2f}", f"{r['layouts']:,}", f"{r['layouts_per_s']:,}", f"{r['plans']:,}")
            for r in results
        ],
    )
    console.print("layouts of one kind of machine that differ in recomputation alone count one by one", style="dim")
    save(options.out, {**record, "offers": len(offers), "memory": memory, "results": results})


if __name__ == "__main__":
    main()
