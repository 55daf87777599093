"""iosim: an IO-aware GPU memory-hierarchy simulator for attention kernels."""
