collect_ignore_glob = ["*_verl.py", "*_trl.py", "*_standins.py", "verl_*.py"]  # scripts of test_peers.py
