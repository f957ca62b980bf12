"""A served teacher gives the log-probs of the served model's own forward."""

import pytest
from served import check_teacher

from rlkit.rollout.engines.servers.teacher import ServedTeacher

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


def test_log_probs_of_given_tokens_and_of_the_most_likely_ones(server, models):
    check_teacher(ServedTeacher(server.url), models[0])
