"""A server that is killed under load loses no session."""

from benchmarks import serve_kills


def test_killed_servers_leave_every_session_as_its_client_saw_it(tmp_path):
    found = serve_kills.run(tmp_path, 2)
    assert found["as last seen"] + found.get("with the turn in flight", 0) == 2 * serve_kills.SESSIONS
    assert found["turns"] > 0
