"""What `engramhc.compat.install` decides."""

precision = "fp32"  # of every projection
