"""A plain TensorFlow script with MultiWorkerMirroredStrategy, which reads TF_CONFIG.

slipstream submit tensorflow_mirrored.py --on local --workers 2
"""

import json
import os

import tensorflow as tf
from sklearn.datasets import load_digits

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
images, labels = load_digits(return_X_y=True)
images, labels = (images / 16).astype("float32"), labels.astype("int32")

BATCH = 64
with strategy.scope():
    weight, bias = tf.Variable(tf.zeros([64, 10])), tf.Variable(tf.zeros([10]))
    data = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(BATCH)
    shared = iter(strategy.experimental_distribute_dataset(data))


@tf.function
def step(inputs, targets):
    with tf.GradientTape() as tape:
        scores = tf.matmul(inputs, weight) + bias
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, scores)
        loss = tf.reduce_sum(losses) / BATCH
    for variable, gradient in zip((weight, bias), tape.gradient(loss, (weight, bias)), strict=True):
        everywhere = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradient)
        variable.assign_sub(0.5 * everywhere)
    return loss


for number in range(20):
    loss = strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=next(shared)), axis=None)
    if rank == 0 and number % 5 == 4:
        print(f"step {number + 1}: loss {float(loss):.4f} on {strategy.num_replicas_in_sync} workers", flush=True)
