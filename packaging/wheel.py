#!/usr/bin/env python3
"""Writes a wheel of a folder: wheel.py FOLDER NAME VERSION TAG SUMMARY OUT (run by `cargo xtask package`).

FOLDER is the root of the wheel; a file entry_points.txt in it goes to the metadata. Only the standard
library is used. Times are fixed, so that the same files give the same wheel.
"""

import base64
import hashlib
import os
import sys
import zipfile


def main(folder: str, name: str, version: str, tag: str, summary: str, out: str) -> None:
    distribution = name.replace("-", "_")
    info = f"{distribution}-{version}.dist-info"
    requires = [] if name == "ucx-gaudi" else [f"Requires-Dist: ucx-gaudi=={version}"]
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        f"Summary: {summary}",
        "License: BSD-3-Clause",
        "Requires-Python: >=3.8",
        *requires,
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: ucx-gaudi", "Root-Is-Purelib: false", f"Tag: py3-none-{tag}"]

    files = []
    for root, folders, names in os.walk(folder):
        folders.sort()
        for each in sorted(names):
            path = os.path.join(root, each)
            inside = os.path.relpath(path, folder)
            if inside in ("entry_points.txt", "LICENSE"):
                inside = f"{info}/{inside}"
            with open(path, "rb") as file:
                files.append((inside, file.read(), os.stat(path).st_mode))
    for each, lines in (("METADATA", metadata), ("WHEEL", wheel)):
        files.append((f"{info}/{each}", "".join(line + "\n" for line in lines).encode(), 0o100644))

    record = ""
    path = os.path.join(out, f"{distribution}-{version}-py3-none-{tag}.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        def put(inside: str, data: bytes, mode: int) -> None:
            entry = zipfile.ZipInfo(inside, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)

        for inside, data, mode in files:
            put(inside, data, mode)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{inside},sha256={digest},{len(data)}\n"
        put(f"{info}/RECORD", (record + f"{info}/RECORD,,\n").encode(), 0o100644)
    print(path)


main(*sys.argv[1:])
