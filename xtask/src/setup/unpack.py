"""Unpacks a wheel: restores executable bits, leaves out what is not used here, and turns the
copies of a shared library under its several names (a zip knows no links) back into links.

Usage: unpack.py WHEEL FOLDER [PREFIX-TO-LEAVE-OUT ...]
"""

import os
import shutil
import sys
import zipfile

LEFT_OUT_SUFFIXES = (".a", ".la")


def real_name_first(info):
    # libucs.so.0.0.0 before libucs.so.0 before libucs.so: the longest name is the file.
    return (os.path.dirname(info.filename), -len(info.filename))


def unpack(wheel, folder, left_out_prefixes):
    seen = {}
    with zipfile.ZipFile(wheel) as archive:
        for info in sorted(archive.infolist(), key=real_name_first):
            name = info.filename
            if info.is_dir() or name.endswith(LEFT_OUT_SUFFIXES):
                continue
            if left_out_prefixes and name.startswith(left_out_prefixes):
                continue
            path = os.path.normpath(os.path.join(folder, name))
            if not path.startswith(os.path.join(folder, "")):
                sys.exit("refusing to unpack outside the folder: " + name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            key = (os.path.dirname(name), os.path.basename(name).split(".so")[0], info.CRC, info.file_size)
            if ".so" in name and key in seen:
                os.symlink(seen[key], path)
                continue
            seen[key] = os.path.basename(name)
            with archive.open(info) as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target)
            mode = (info.external_attr >> 16) & 0o777
            os.chmod(path, mode | 0o644)


if __name__ == "__main__":
    try:
        unpack(sys.argv[1], os.path.abspath(sys.argv[2]), tuple(sys.argv[3:]))
    except (OSError, zipfile.BadZipFile) as error:
        sys.exit(str(error))
