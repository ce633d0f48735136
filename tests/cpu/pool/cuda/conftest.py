from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_memopt import cxx
from lightning_memopt.cxx import BuildError
from lightning_memopt.native import build
from tests.cpu.pool.cuda.fake import Fake, fake


@pytest.fixture
def cuda() -> Iterator[Fake]:
    """The allocator over a CUDA without a device; a test leaves nothing in it."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has a real c10_cuda")
    try:
        build.cuda_headers(), cxx.compiler_path()
    except BuildError as error:
        pytest.skip(str(error))
    it = fake()  # with both it can be built: an error fails
    with it.nothing_left():
        yield it
