# SPDX-License-Identifier: Apache-2.0
"""Homes for code written for libraries that are no longer maintained: change the import line, and it runs."""
