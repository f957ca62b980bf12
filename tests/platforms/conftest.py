"""These files run in processes of their own: imported here, they would hide modules and calls from every test."""

collect_ignore_glob = ["*.py"]
