# SPDX-License-Identifier: Apache-2.0
"""What the kernels and the backend are tested and measured with; nothing that ships depends on it."""

__version__ = "0.1.0"
