"""A server that is killed under load loses no session."""

from benchmarks import serve_kills


def test_a_killed_server_leaves_every_session_as_its_client_saw_it(tmp_path):
    found = serve_kills.run(tmp_path, 1)
    assert found["as last seen"] + found["with the turn in flight"] == serve_kills.SESSIONS
    assert found["turns"] > 0
