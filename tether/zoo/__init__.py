# SPDX-License-Identifier: Apache-2.0
"""Known models, built of ``nn``: under the names of their published weights, which ``tether.interop.torch`` loads.

Images are [batch, channels, height, width], the batch axes optional in evaluation; outputs are logits. A model whose
weights are loaded needs no first values: ``model = tether.eval_shape(zoo.resnet50)``, which takes no time, then
``tether.interop.torch.load(model, path)``.
"""

from tether.nn import MLP
from tether.zoo._char_rnn import CharRNN
from tether.zoo._convnet import ConvNet
from tether.zoo._gpt2 import GPT2, gpt2, gpt2_large, gpt2_medium, gpt2_xl
from tether.zoo._resnet import (
    BasicBlock,
    Bottleneck,
    ResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    wide_resnet50_2,
    wide_resnet101_2,
)
from tether.zoo._vit import ViT, vit_b_16, vit_b_32, vit_h_14, vit_l_16, vit_l_32
from tether.zoo._wide_resnet import WideBlock, WideResNet

__all__ = [
    "GPT2",
    "MLP",
    "BasicBlock",
    "Bottleneck",
    "CharRNN",
    "ConvNet",
    "ResNet",
    "ViT",
    "WideBlock",
    "WideResNet",
    "gpt2",
    "gpt2_large",
    "gpt2_medium",
    "gpt2_xl",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "vit_b_16",
    "vit_b_32",
    "vit_h_14",
    "vit_l_16",
    "vit_l_32",
    "wide_resnet50_2",
    "wide_resnet101_2",
]
