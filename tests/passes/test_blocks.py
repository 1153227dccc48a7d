"""Random blocks, which the module `blocks` draws, have eager's results and leave their inputs as eager does.

`python tests/passes/run_random_programs.py blocks` runs any number of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands import python
from tests.support.families import sample
from tests.support.programs.block_parts import TABLES
from tests.support.programs.blocks import block_program
from tests.support.programs.source_programs import through_the_pass

PROGRAMS = 200
RUNNER = Path(__file__).with_name("run_random_programs.py")


@pytest.mark.parametrize("seed", sample(range(PROGRAMS), every=25))
def test_block(seed: int) -> None:
    block = block_program(seed)
    try:
        through_the_pass(block)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{block}") from error


@pytest.mark.long
def test_every_part_occurs() -> None:
    """Each seed gives one block, and the first 1500 seeds contain all parts."""
    blocks = [block_program(seed) for seed in range(1500)]
    assert [block_program(seed) for seed in range(0, 1500, 50)] == blocks[::50]
    wanted = {f"{title}: {name}" for title, table in TABLES.items() for name in table}
    assert wanted - {part for block in blocks for part in block.parts} == set()


@pytest.mark.parametrize("region", ["checkpoint", "inference_mode", "autocast to bfloat16", "no_grad"])
def test_layers_in_regions_are_fused(region: str) -> None:
    """For each region, there is a random block whose region contains a whole dense layer, and this layer is fused."""
    blocks = (block_program(seed) for seed in range(1000))
    regions = (block for block in blocks if {f"region: {region}", "extent: whole", "layer: dense"} <= {*block.parts})
    assert any(through_the_pass(block) == "fused" for block in regions)


@pytest.mark.long
def test_the_script_counts_blocks_by_part() -> None:
    seed = next(seed for seed in range(100) if through_the_pass(block_program(seed)) == "fused")
    found = python(RUNNER, "blocks", "--seed", str(seed))
    for part in (*block_program(seed).parts, "all"):
        assert re.search(rf"^{re.escape(part)} +1 fused, +0 refused, +0 silent, +0 skipped, +0 failed$", found, re.M)
