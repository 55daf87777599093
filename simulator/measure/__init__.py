"""Measure real kernels on a CUDA machine: times, clocks, hardware counters and the chip's own rates.

Importing this package imports nothing heavy; PyTorch is imported only when something is measured.
"""
