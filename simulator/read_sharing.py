"""Reads that L2 never sees: SMs that ask for the same lines in step send one request, and some rereads hit L1.

Counted on an H200 (``micro_read_sharing.csv``): two SMs of one TPC that read the same lines up to some 300 cycles apart
cost L2 one read each line, at 1,200 cycles apart three quarters of it is still shared; SMs of different TPCs share
within a few tens of cycles only, which CTAs keep up while a launch opens. Consecutive CTAs of a launch land on the SMs
of one TPC, consecutive TPCs in one GPC. What the launches of whole kernels add (``launches_run1.csv``,
``launches_random_run1.csv``, calibrating rows):

* a pair that starts in step drifts apart like a random walk: after ``n`` iterations ``1 / (1 + sqrt(n / n0))`` of its
  reads were shared, with ``n0`` the kernel's ``in_step_iterations``; CTAs without another on their SM hardly drift;
* a static schedule keeps the pairs for the whole launch, and their drift with them; otherwise a pair that ends in step
  takes the next two CTAs, which pair up again if their walks are equal, and one that does not finds a partner again
  with a small chance (:data:`PAIRS_AGAIN`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.accesses import Access, access_bytes, index_values, kernel_accesses
from simulator.launch import occupancy
from simulator.profile import Profile
from simulator.program import Kernel, once_a_kernel

#: Chance that SMs whose CTAs did not end in step start their next ones, where these walk alike, in step again.
PAIRS_AGAIN = 0.25
#: TPCs of a GPC (Hopper's whitepaper: 9, of which an H200 has 8 or 9), and the share of its common reads that L2 sees
#: once while a launch opens: what a CTA asks before its loops and in their first iteration.
TPCS_OF_GPC, OPENS_IN_STEP = 8, 0.8


def unseen_read_bytes(kernel: Kernel, profile: Profile) -> dict[str, int]:
    """Bytes of ``kernel``'s loads, by tensor, that L2 is not asked for on ``profile``: a neighbouring SM's equal load
    brings them (``l2_read_sharers`` SMs ask as one; 1: none do), or L1 still holds them."""
    unseen = _in_l1(kernel)
    if profile.l2_read_sharers > 1 and kernel.in_step_iterations > 0 and kernel.ctas > 1:
        residents = occupancy(kernel, profile)
        for name, size in _shared(kernel, profile.l2_read_sharers, profile.num_sms, residents).items():
            unseen[name] = unseen.get(name, 0) + size
    return unseen


def _in_l1(kernel: Kernel) -> dict[str, int]:
    found: dict[str, int] = {}
    for access in kernel_accesses(kernel):
        if access.from_l1 > 0.0:
            name = access.tile.tensor.name
            size = int(int(access_bytes(access, kernel).sum()) * access.from_l1)
            found[name] = found.get(name, 0) + size
    return found


@dataclass(frozen=True)
class _Walk:
    """One load of every CTA: where it starts, how often it is made (0: once, outside loops), and its bytes."""

    access: Access
    starts: np.ndarray
    count: np.ndarray
    bytes: np.ndarray

    def equal(self, distance: int) -> np.ndarray:
        """Whether CTA ``i`` starts where ``i + distance`` does."""
        same: np.ndarray = (self.starts[:, distance:] == self.starts[:, :-distance]).all(axis=0)
        return same


def _walks(kernel: Kernel) -> list[_Walk]:
    found = []
    for access in kernel_accesses(kernel):
        place = access.tile
        # a cluster's multicast is one read already, in which each CTA asks for its own rows
        if access.is_write or "cluster_rank" in dict(place.row.terms):
            continue
        env = dict(kernel.coords) | {loop.var: 0 for loop in access.loops}
        starts, counts = (
            [np.broadcast_to(index_values(index, env), (kernel.ctas,)) for index in indices]
            for indices in ((place.head, place.row, place.col), [loop.count for loop in access.loops])
        )
        count = np.prod(np.maximum(counts, 0), axis=0) if counts else np.zeros(kernel.ctas, np.int64)
        found.append(_Walk(access, np.stack(starts), count, access_bytes(access, kernel)))
    return found


@once_a_kernel
def _shared(kernel: Kernel, sharers: int, sms: int, residents: int) -> dict[str, int]:
    walks = _walks(kernel)
    in_loops = [w for w in walks if w.access.loops]
    if not in_loops:
        return {}
    by_tensor: dict[str, np.ndarray] = {}
    for w in in_loops:
        name = w.access.tile.tensor.name
        by_tensor[name] = by_tensor.get(name, np.zeros(kernel.ctas)) + w.count
    iterations = np.max(list(by_tensor.values()), axis=0)
    places = _Places.of(kernel, sharers, sms, residents)
    longest = max(in_loops, key=lambda w: float(w.bytes.sum()))
    drifts, paired = _pairs(kernel, places, longest, iterations)
    openings: dict[bytes, np.ndarray] = {}
    unseen: dict[str, int] = {}
    for w in walks:
        # of the sharers - 1 SMs beside it, how many ask what a CTA does, in step
        shared = np.zeros(kernel.ctas)
        for distance in range(1, min(sharers, kernel.ctas)):
            a, b = w.count[:-distance], w.count[distance:]
            common = w.equal(distance) * (np.minimum(a, b) / np.maximum(np.maximum(a, b), 1) if w.access.loops else 1.0)
            if w.access.loops or kernel.schedule == "static":
                common = common * drifts[distance - 1]
            common = common * paired[distance - 1] / sharers
            shared[distance:] += common
            shared[:-distance] += common
        start = w.starts[:, : places.slots]
        if (key := start.tobytes()) not in openings:
            openings[key] = places.opening(start)
        opening = openings[key]
        first = 1.0 / np.maximum(w.count[: opening.size], 1)
        shared[: opening.size] += np.maximum(OPENS_IN_STEP * opening - shared[: opening.size], 0.0) * first
        name = w.access.tile.tensor.name
        unseen[name] = unseen.get(name, 0) + int((w.bytes * shared).sum())
    most = _asked_again(walks)
    return {name: min(size, most[name]) for name, size in unseen.items() if min(size, most[name]) > 0}


def _asked_again(walks: list[_Walk]) -> dict[str, int]:
    """By tensor, what is asked beyond one reading of what the CTA that asks most of each head does: no more is shared
    (a common tile may be cut at the tensor's end where others are not)."""
    found: dict[str, int] = {}
    for name in {w.access.tile.tensor.name for w in walks}:
        own = [w for w in walks if w.access.tile.tensor.name == name]
        asked, heads = np.sum([w.bytes for w in own], axis=0), own[0].starts[0]
        once = np.zeros(int(heads.max(initial=0)) + 1, np.int64)
        np.maximum.at(once, np.maximum(heads, 0), asked)
        found[name] = int(asked.sum() - once.sum())
    return found


@dataclass(frozen=True)
class _Places:
    """Where CTAs land: the SM of each in the launch's first wave (or on its slot, for a static schedule), and waves."""

    sharers: int
    sms: int
    slots: int
    sm: np.ndarray
    wave: np.ndarray
    alone: np.ndarray

    @staticmethod
    def of(kernel: Kernel, sharers: int, sms: int, residents: int) -> _Places:
        slots = sms * residents
        cta = np.arange(kernel.ctas)
        sm = cta % slots % sms
        # with one wave or less, SMs that hold a single CTA of a kernel that could share them
        here = np.bincount(sm[:slots], minlength=sms)
        alone = (here[sm] == 1) & (residents > 1) & (kernel.ctas <= slots)
        return _Places(sharers, sms, slots, sm, cta // slots, alone)

    def together(self, distance: int) -> np.ndarray:
        """Whether CTA ``i`` and ``i + distance`` land on SMs that share, as the first wave does."""
        a, b = self.sm[:-distance], self.sm[distance:]
        beside: np.ndarray = (b == a + distance) & (a // self.sharers == b // self.sharers)
        return beside

    def opening(self, starts: np.ndarray) -> np.ndarray:
        """Share of each first-wave CTA's reads at ``starts`` that other SMs of its GPC ask for, too."""
        first = starts.shape[1]
        group = np.arange(first) // self.sms * self.sms + self.sm[:first] // (self.sharers * TPCS_OF_GPC)
        keys = np.vstack([starts, group])
        _, place, times = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
        share: np.ndarray = 1.0 - 1.0 / times[place.reshape(-1)]
        return share


def _pairs(
    kernel: Kernel, places: _Places, longest: _Walk, iterations: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each distance below ``sharers``, of CTA ``i`` and the one so far behind it: the share of their common reads
    that their drift leaves in step, and how likely they start on SMs that share, in step."""
    n0, sharers = kernel.in_step_iterations, places.sharers
    distances = range(1, min(sharers, kernel.ctas))
    if kernel.schedule == "static":
        of_launch = np.sqrt(float(iterations.sum()) / min(kernel.ctas, places.slots) / n0)
        drifts = [np.full(kernel.ctas - d, 1.0 / (1.0 + of_launch)) for d in distances]
        return drifts, [places.together(d).astype(float) for d in distances]
    drifts, paired = [], []
    for d in distances:
        walked = np.sqrt(np.minimum(iterations[d:], iterations[:-d]) / n0)
        walked = np.where(places.alone[d:] & places.alone[:-d], 0.0, walked)
        drifts.append(1.0 / (1.0 + walked))
        if d == 1:
            # still in step when the shorter ends: d/dn of n / (1 + sqrt(n / n0))
            at_end = (1.0 + walked / 2.0) / (1.0 + walked) ** 2
            in_step = _by_wave(kernel, places, longest, at_end)
        first = places.wave[d:] == 0
        anywhere = in_step[places.wave[d:]] * (sharers - d) / sharers
        paired.append(np.where(first, places.together(d), anywhere))
    return drifts, paired


def _by_wave(kernel: Kernel, places: _Places, longest: _Walk, at_end: np.ndarray) -> np.ndarray:
    """How likely neighbouring SMs start consecutive CTAs in step, by wave."""
    wave = places.wave[1:]
    waves = int(places.wave[-1]) + 1
    again = longest.equal(1) & (longest.count[1:] == longest.count[:-1])
    beside = np.where(wave == 0, places.together(1), True).astype(float)
    pairs = np.maximum(np.bincount(wave, beside, waves), 1e-9)
    # equal walks end together and go on together; of unequal ones neither is likely
    kept = (np.bincount(wave, beside * again * at_end, waves) / pairs).tolist()
    alike = (np.bincount(wave, again, waves) / np.maximum(np.bincount(wave, minlength=waves), 1)).tolist()
    chances = [1.0]
    for w in range(1, waves):
        stay = chances[-1] * kept[w - 1]
        chances.append(stay + (1.0 - stay) * PAIRS_AGAIN * alike[w - 1])
    return np.array(chances)
