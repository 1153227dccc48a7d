"""Right MGLU programs with one perturbation, their enumeration, and what must hold for each program.

A seed selects the right program, and an index the perturbation and its place. `program(seed, index)` makes the
perturbed program, `indices(seed)` lists all indices of a seed, and `sample(number)` draws a seed and an index.

If eager runs the program, and Dynamo's graph without the pass gives the same outcome, then the graph after the pass
must give this outcome too. The outcome includes:

- all results and all inputs afterwards: values, strides, and which of them share memory,
- the gradients of all trained inputs; a gradient that eager lacks must be missing, because an optimizer decays a weight
  whose gradient is 0,
- the state of the random number generator.

A graph in which nothing is fused must not be changed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

from perturbations import PERTURBATIONS, Perturbation, Place, Scopes, perturbed, places
from right_programs import Program, draw
from source_programs import through_the_pass as through_the_pass

SAMPLES_PER_SEED = 20
FAMILIES = {
    "writes": 4,
    "views": 4,
    "pairs": 4,
    "metadata": 1,
    "hooks": 1,
    "hooks under compiled autograd": 1,
    "draws": 2,
    "dtypes": 1,
    "gradients": 2,
    "users": 2,
}
"""The relative frequency of each family of perturbations."""


# --- Enumeration -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def right_program(seed: int) -> tuple[Program, Scopes]:
    """The right program of a seed, and the tensors in scope at each of its positions."""
    program = draw(seed)
    return program, list(program.scopes())


def perturbation(index: int) -> Perturbation:
    """The perturbation of an index, which is a position in `PERTURBATIONS` plus a multiple of their number."""
    return PERTURBATIONS[index % len(PERTURBATIONS)]


def place(seed: int, index: int) -> Place:
    """The place that the index selects for its perturbation in the program of a seed.

    Raises:
        IndexError: the program has fewer such places.
    """
    return _places(seed, index % len(PERTURBATIONS))[index // len(PERTURBATIONS)]


@functools.lru_cache(maxsize=2)
def _places(seed: int, number: int) -> list[Place]:
    """All places of `PERTURBATIONS[number]` in the right program of a seed."""
    return places(PERTURBATIONS[number], *right_program(seed))


def program(seed: int, index: int) -> Program:
    """The perturbed program of a seed and an index."""
    return perturbed(perturbation(index), right_program(seed)[0], place(seed, index))


def indices(seed: int) -> Iterator[int]:
    """The indices of all perturbed programs of a seed."""
    for number in range(len(PERTURBATIONS)):
        yield from (number + len(PERTURBATIONS) * k for k in range(len(_places(seed, number))))


def sample(number: int) -> tuple[int, int]:
    """The seed and index of a random program. Neighbouring numbers share one right program."""
    seed, dice = number // SAMPLES_PER_SEED, random.Random(number)
    while True:
        family = dice.choices(list(FAMILIES), list(FAMILIES.values()))[0]
        chosen = dice.choice([k for k, change in enumerate(PERTURBATIONS) if change.family == family])
        if count := len(_places(seed, chosen)):
            return seed, chosen + len(PERTURBATIONS) * dice.randrange(count)
