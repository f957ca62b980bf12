"""What users of other systems bring: rewards, environments, flags. The core imports none of it, only scripts do.

A file per kind, and in it a row per system:

    rewards     `adapted`: reward functions of TRL, verl, OpenRLHF, slime, RL2, rl4llm, rl-max
    envs        `adapted`: environments of RL2, OpenRLHF, verifiers, Gymnasium, GEM, TextArena, OpenEnv, rl4llm
    rows        rows of data as they write them
    tasks, games, libraries     task folders, games and environments of packages
    flags, commands             what stands here for a flag of theirs, and for a whole command
"""
