"""Settings that the property tests share.

``IOSIM_LAWS=nightly`` in the environment tries ten times the examples, other ones each time.
"""

import os

from hypothesis import HealthCheck, settings

NIGHTLY = os.environ.get("IOSIM_LAWS") == "nightly"
#: How many times the usual number of examples.
MORE = 10 if NIGHTLY else 1


def laws(examples: int):
    """Settings of a property with ``examples`` examples: reproducible, no deadline (the machine is shared)."""
    return settings(
        max_examples=examples * MORE,
        deadline=None,
        derandomize=not NIGHTLY,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
