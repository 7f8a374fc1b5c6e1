"""What the transforms make of the pinned releases' files; written by scripts/refresh_goldens.py.

role -> sha256 of the original -> sha256 of the result, and how many of the original's lines stand before each block.
"""

PROVEN: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "server_args": {
        "dd5035cadf7ce606a536c762c737e678b0931fea13ee58edeaa700571a35fd43": (
            "ffbab1d2493e08cff6f440519fc149f4f087bc6b70b2de8222591d2c22b94243",
            (473, 797, 3970),
        ),
        "2d55216e25f307f17f2be45a62b3e7adfe223360733850d8f48a7802d315f870": (
            "10d2d813595d0a8b2b9352a4727efbe0005013eefa7a64e1472fe7c805d36ca4",
            (585, 1000, 5834),
        ),
    },
    "eagle_worker": {
        "2123c44d0d1b2941f13ef31ba19458d45191d060acac18523aace08dc3f5f4df": (
            "58b024d116f3f8428791bd23660129346326d7c72efb6009ac706c73bc2a3780",
            (59, 211, 289),
        ),
        "a797976959804c8f354043750a004c134eb0fcab6075a5d0af949a2923a390e9": (
            "76cbcf93ef59b91e43bc06fd1f78a26544532fd97077a424e87d36628fbe7e84",
            (69, 247, 456),
        ),
    },
    "eagle_worker_v2": {
        "c96af256bbc32b067f2b7afcaa33466c102007f1db6d9ef4c56685665c9e9222": (
            "904880db26b0af87d6d88b14e65ad0109c50f45640c8fa046e090490fea2da2c",
            (52, 636, 650),
        ),
        "fa18bee77ba17bf722b5b111966d60c03fa6757f3f80c9fabdf5e4c9c7b5e242": (
            "723d97c91666754922f7307a08f891be4f137410b3a3fe81a1a3217fa75ff1b0",
            (63, 730, 744),
        ),
    },
}
