"""Settings that the property tests share."""

from hypothesis import HealthCheck, settings


def laws(examples: int):
    """Settings of a property with ``examples`` examples: reproducible, no deadline (the machine is shared)."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
