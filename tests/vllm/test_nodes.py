"""Two nodes, each with a vLLM server of its own."""

from __future__ import annotations

import pytest
from nodes import can_make_networks
from two_samplers import check_two_samplers


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not can_make_networks(), reason="needs network namespaces")
def test_the_servers_of_two_nodes_sample_what_four_ranks_train(vllm_python, checkpoints, tmp_path):
    asked = '"POST /inference/v1/generate HTTP/1.1" 200'
    check_two_samplers("vllm", vllm_python, checkpoints[0], tmp_path, "--engine-args=--max-model-len 8192", asked=asked)
