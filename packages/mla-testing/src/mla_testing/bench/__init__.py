# SPDX-License-Identifier: Apache-2.0
from mla_testing import limits  # noqa: F401  reads the process's CPUs, before PyTorch's OpenMP binds the main thread
