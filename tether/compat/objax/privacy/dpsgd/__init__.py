# SPDX-License-Identifier: Apache-2.0
"""Differentially private gradients, and what privacy they leave.

| Objax | here | what differs |
| --- | --- | --- |
| PrivateGradValues | gradient.py | see there |
| analyze_dp, analyze_renyi, convert_renyidp_to_dp, ... | privacyaccountant.py | see there |
"""

from tether.compat.objax.privacy.dpsgd.gradient import PrivateGradValues
from tether.compat.objax.privacy.dpsgd.privacyaccountant import (
    analyze_dp,
    analyze_dp_sample_without_replacement,
    analyze_renyi,
    analyze_renyi_sample_without_replacement,
    convert_renyidp_to_dp,
)

__all__ = [
    "PrivateGradValues",
    "analyze_dp",
    "analyze_dp_sample_without_replacement",
    "analyze_renyi",
    "analyze_renyi_sample_without_replacement",
    "convert_renyidp_to_dp",
]
