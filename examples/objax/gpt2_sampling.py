# SPDX-License-Identifier: Apache-2.0
"""Objax code: GPT-2 written out in Objax, with random weights; its continuation of a text, with and without a past."""

import argparse

import jax.numpy as jn
import numpy as np

import tether.compat.objax as objax
from tether.compat.objax.variable import TrainVar


class Norm(objax.module.Module):
    def __init__(self, size):
        self.g, self.b = TrainVar(jn.ones(size)), TrainVar(jn.zeros(size))

    def __call__(self, x):
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * objax.functional.rsqrt(var + 1e-5) * self.g.value + self.b.value


class Conv1D(objax.module.Module):
    def __init__(self, nin, nout):
        self.w, self.b = TrainVar(jn.zeros((nin, nout))), TrainVar(jn.zeros(nout))

    def __call__(self, x):
        return x @ self.w.value + self.b.value


class Block(objax.module.Module):
    def __init__(self, size, heads):
        self.heads = heads
        self.norm1, self.norm2 = Norm(size), Norm(size)
        self.attend, self.project = Conv1D(size, 3 * size), Conv1D(size, size)
        self.wide, self.narrow = Conv1D(size, 4 * size), Conv1D(4 * size, size)

    def __call__(self, x, past):
        batch, length, size = x.shape
        split = lambda part: part.reshape((batch, length, self.heads, -1)).transpose((0, 2, 1, 3))
        q, k, v = map(split, jn.split(self.attend(self.norm1(x)), 3, axis=2))
        present = jn.stack([k, v], axis=1)  # (batch, 2, heads, length, size of a head)
        if past is not None:
            k, v = (jn.concatenate([past[:, n], part], axis=-2) for n, part in enumerate((k, v)))
        weights = q @ k.swapaxes(-1, -2) / np.sqrt(v.shape[-1]).astype(np.float32)
        total = k.shape[-2]
        mask = jn.arange(total)[None] <= jn.arange(total - length, total)[:, None]
        mixed = objax.functional.softmax(jn.where(mask, weights, -1e10)) @ v
        x = x + self.project(mixed.transpose((0, 2, 1, 3)).reshape(x.shape))
        hidden = self.wide(self.norm2(x))
        gelu = 0.5 * hidden * (1 + jn.tanh(np.float32(np.sqrt(2 / np.pi)) * (hidden + 0.044715 * hidden**3)))
        return x + self.narrow(gelu), present


class GPT2(objax.module.Module):
    def __init__(self, vocabulary, context, size, heads, layers):
        self.wpe, self.wte = TrainVar(jn.zeros((context, size))), TrainVar(jn.zeros((vocabulary, size)))
        self.blocks = objax.module.ModuleList([Block(size, heads) for _ in range(layers)])
        self.norm = Norm(size)

    def __call__(self, tokens, past=None):
        first = 0 if past is None else past.shape[-2]
        x = self.wte.value[tokens] + self.wpe.value[jn.arange(first, first + tokens.shape[1])]
        presents = []
        for n, block in enumerate(self.blocks):
            x, present = block(x, None if past is None else past[:, n])
            presents.append(present)
        return {"logits": self.norm(x) @ self.wte.value.T, "present": jn.stack(presents, axis=1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    model = objax.Jit(GPT2(vocabulary=96, context=64, size=48, heads=4, layers=3))
    random = np.random.default_rng(0)
    for name, variable in model.vars().items():  # where the published weights would come in
        if not name.endswith((".g", ".b")):
            variable._value = (0.3 * random.standard_normal(variable.shape)).astype(np.float32)

    prompt = [ord(letter) - 32 for letter in "Hello, "]
    tokens = list(prompt)
    for _ in range(args.tokens):
        tokens.append(int(model(jn.array([tokens]))["logits"][0, -1].argmax()))
    out, again = model(jn.array([prompt])), list(prompt)
    past = out["present"]
    for _ in range(args.tokens):
        again.append(int(out["logits"][0, -1].argmax()))
        out = model(jn.array([again[-1:]]), past=past)
        past = jn.concatenate([past, out["present"]], axis=-2)
    print("".join(chr(token + 32) for token in tokens))
    print("the same with a past:", again == tokens)


if __name__ == "__main__":
    main()
