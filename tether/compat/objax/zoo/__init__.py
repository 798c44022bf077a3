# SPDX-License-Identifier: Apache-2.0
"""Networks, each in a module of its own, imported by name: ``import objax.zoo.wide_resnet``.

| Objax | here | what differs |
| --- | --- | --- |
| zoo.convnet, dnnet, resnet_v2, rnn, vgg, wide_resnet | the same modules | see each |
"""
