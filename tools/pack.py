"""Pack a folder of images into a few large tar files, which training reads in any order.

    make pack DATA=photos OUT=photos.packed
    make run RECIPE=ddp_launch ARGS="--data packed --data-path photos.packed"

Every image is decoded once, and refused if that fails. Without --largest-side the images are stored
as they are, and training gives the same bits as on the folder. The tar files are those of
WebDataset (000000123.jpg, 000000123.cls), beside one index. OUT.part
becomes OUT at the end. The same folder gives the same bytes.

    make pack DATA=shards                       only index tar files that WebDataset made, in
                                                shards/, or in its train/ and val/
    make pack DATA=shards ARGS="--suffix .npy"  files of another kind, for a Dataset of your own
    make pack OUT=photos.packed ARGS=--verify   compare every image with its checksum
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
import PIL
from numpy.typing import NDArray

from common import log
from common.data.array_file import Texts, write_arrays
from common.data.decode import SUFFIXES, image_fault, is_image, refuse_faults
from common.data.image_folder import Files, Header, Listing, left_out, list_images
from common.data.packed import HEAD, INDEX, RESTORE, Pack, Shard
from common.errors import InputError, TrainingError
from common.launch.capacity import usable_cores
from common.launch.ranks import Ranks
from common.masking import printable
from common.option_rules import refuse_below
from common.parse import given_path, input_errors
from common.reading import refuse_closed
from common.run.claim import refuse_in_data
from common.terminal import progress_bar, set_up_logs
from common.writing import write_file, writing
from tools.command import Parser, attempt

BLOCK = 512
"""A tar file consists of blocks of so many bytes."""

WINDOW = 512
"""Images that are in memory at once."""

MOST_CLASSES = 1_000_000
"""A class number from here on is taken for an identifier: ImageNet has 02119789."""

RECORD = np.dtype([("shard", "i4"), ("offset", "i8"), ("size", "u4"), ("crc32", "u4")])
"""What the index says of an image, as `common.data.packed` describes it."""


def record(shard: int, offset: int, content: bytes) -> tuple[int, int, int, int]:
    """That of one image."""
    return shard, offset, len(content), zlib.crc32(content)


def smaller(content: bytes, largest_side: int, quality: int) -> bytes:
    """An image, resized if a side is longer than `largest_side` [px], in its own format."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content)) as opened:
        if max(opened.size) <= largest_side:
            return content
        kind = opened.format or "PNG"
        image = ImageOps.exif_transpose(opened)
        image = image if image.mode in ("L", "RGB") else image.convert("RGB")
        image.thumbnail((largest_side, largest_side), Image.Resampling.LANCZOS)
        result = io.BytesIO()
        more = {"quality": quality} if kind in ("JPEG", "MPO", "WEBP") else {}
        image.save(result, format=kind, **more)
        return result.getvalue()


def pack(folder: Path, out: Path, shard_bytes: int, largest_side: int, quality: int) -> str:
    """Pack the images of `folder` into `out`; returns what to say of it."""
    out = out.resolve()  # it may be a link to an empty folder
    refuse_in_data(out, folder, "OUT", "DATA")
    listing, _ = list_images(folder, show_progress=True)
    made: dict[str, Any] = {"shard_bytes": shard_bytes, "of": listing.fingerprint}
    if largest_side:
        made |= {"largest_side": largest_side, "quality": quality, "pillow": PIL.__version__}
    if (out / INDEX).exists():
        found = Pack(out, check=True).made
        if {**made, "sha256": found["sha256"]} != found:
            raise InputError(
                f"{out} is a pack of other images, or made otherwise: give another OUT"
            )
        return f"{out} is the pack of {folder} already"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is no empty folder: give another OUT")
    if os.path.ismount(out):
        raise InputError(f"{out} is a mount point, which cannot be renamed: give a folder in it")
    part = out.with_name(f"{out.name}.part")
    if os.path.lexists(part):
        raise InputError(
            f"{part} exists: another process packs into it, or was killed; then remove it"
        )
    with writing(part):
        part.mkdir(parents=True)
    try:
        resize = partial(smaller, largest_side=largest_side, quality=quality)
        records, shards = write_shards(
            folder, part, listing, shard_bytes, resize if largest_side else None
        )
        if largest_side:
            sizes = hash_of_sizes(listing.names, records["size"])
            listing = replace(listing, fingerprint=sizes)
        write_index(part, listing, records, shards, made)
        with writing(out):
            part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    size = sum(shard.bytes for shard in shards)
    return (
        f"packed {len(listing.labels):,} images of {len(listing.class_names)} classes into "
        f"{len(shards)} tar files ({size / 1e9:.1f} GB) in {out}"
    )


def write_shards(
    folder: Path,
    out: Path,
    listing: Listing,
    shard_bytes: int,
    resize: Callable[[bytes], bytes] | None,
) -> tuple[NDArray[Any], list[Shard]]:
    """Write the tar files; returns what the index says of images and tar files.

    Raises:
        InputError: names all images that cannot be decoded.
    """
    files, faults = Files(folder, listing.names, listing.labels), list[str]()
    records = np.empty(len(files), RECORD)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(files))
    in_tar = np.cumsum(-(-listing.sizes[order] // BLOCK) * BLOCK + 3 * BLOCK)
    cuts = np.flatnonzero(np.diff(in_tar // shard_bytes)) + 1

    def content_of(index: int) -> tuple[int, bytes]:
        path, _ = files[index]
        content, fault = b"", None
        try:
            content = path.read_bytes()
            fault = image_fault(content, str(path))
            if fault is None and len(content) != listing.sizes[index]:
                fault = f"{path} changed while it was packed: pack again"
            if resize and not fault:
                content = resize(content)
        except OSError as error:
            fault = f"{path} cannot be read ({error.strerror or error}): remove or replace it"
        except Exception as error:  # Pillow's encoders raise many types
            fault = f"{path} cannot be made smaller ({error}): remove or replace it"
        faults.extend([fault] if fault else [])
        return index, content

    def write(contents: Iterator[tuple[int, bytes]], number: int, file: IO[bytes]) -> None:
        for index, content in contents:
            bar.update()
            if not faults:  # else only look for more of them
                add(file, f"{index:09d}{Path(listing.names[index]).suffix.lower()}", content)
                place = file.tell() - padded(len(content))
                records[index] = record(number, place, content)
                add(file, f"{index:09d}.cls", str(listing.labels[index]).encode())
        file.write(bytes(2 * BLOCK))

    bar = progress_bar(len(files), unit="image", desc="packing", keep=False)
    shards: list[Shard] = []
    with bar, ThreadPoolExecutor(usable_cores()) as pool:
        for number, members in enumerate(np.split(order, cuts)):
            tar = out / f"{number:06d}.tar"
            contents = ahead(pool, content_of, members.tolist())
            write_file(tar, partial(write, contents, number))
            shards.append(described(out, tar.name))
    refuse_faults(faults)
    return records, shards


def ahead(
    pool: ThreadPoolExecutor, work: Callable[[int], Any], items: Sequence[int]
) -> Iterator[Any]:
    """`work` of each item, in their order, a window of them ahead of time."""
    windows = [items[start : start + WINDOW] for start in range(0, len(items), WINDOW)]
    following = pool.map(work, windows[0])
    for window in [*windows[1:], []]:
        now, following = following, pool.map(work, window)
        yield from now


def padded(size: int) -> int:
    """The bytes that a file takes in a tar file."""
    return -(-size // BLOCK) * BLOCK


def add(file: IO[bytes], name: str, content: bytes) -> None:
    """Add a file to a tar file: the same bytes whenever and by whomever."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    file.write(info.tobuf(tarfile.USTAR_FORMAT))
    file.write(content.ljust(padded(len(content)), b"\0"))


def described(root: Path, name: str) -> Shard:
    """A tar file as it is."""
    with (root / name).open("rb") as file:
        head = zlib.crc32(file.read(HEAD))
        return Shard(name, file.seek(0, io.SEEK_END), head)


def hash_of_sizes(names: Iterable[str], sizes: NDArray[Any]) -> str:
    """As the fingerprint of a folder of images is taken."""
    pairs = [list(pair) for pair in zip(names, sizes.tolist(), strict=True)]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def write_index(
    out: Path, listing: Listing, records: NDArray[Any], shards: list[Shard], made: dict[str, Any]
) -> None:
    """Write the index, which makes the folder a pack."""
    names = listing.names
    arrays: dict[str, NDArray[Any]] = {"names": names.joined, "ends": names.ends}
    arrays |= {"labels": listing.labels, **{n: records[n].copy() for n in RECORD.names or ()}}
    digest = hashlib.sha256()
    more = {**listing.header, "shards": [asdict(shard) for shard in shards]}
    digest.update(json.dumps(more).encode())
    for array in arrays.values():
        digest.update(np.ascontiguousarray(array).data)
    more["made"] = {**made, "sha256": digest.hexdigest()}
    write_file(out / INDEX, partial(write_arrays, arrays=arrays, more=more))


def index(root: Path, suffix: str = "") -> str:
    """Index tar files that lie in `root`, or in its train/ and val/; returns what to say of it.

    Args:
        root: a folder.
        suffix: the samples are the files whose names end so. They are not decoded, and need no
            class. Empty: they are images.

    Raises:
        InputError: no tar files, an image without a class, or one that cannot be decoded; or some
            samples have a class, and others none.
    """
    refuse_closed("DATA", root)
    if not root.is_dir():
        raise InputError(f"{root} is not a folder")
    if (root / INDEX).exists():
        raise InputError(f"{root} has an index: ARGS=--verify checks it; remove it to make another")
    groups = [sorted(root.glob("*.tar"))]
    if not groups[0]:
        groups = [sorted((root / part).glob("*.tar")) for part in ("train", "val")]
    tars = [path for group in groups for path in group]
    archive = re.compile(r"(?i)\.(tar(\..*)?|t[gx]z|tbz2?|zip)$")
    beside = [p for p in root.rglob("*.*") if archive.search(p.name) and p not in tars]
    if beside:
        raise InputError(
            f"{sorted(beside)[0]} would be left out: unpack a compressed one, give each a name "
            f"that ends in .tar, and put all into {root}, or into its train/ and val/"
        )
    if not all(groups):
        raise InputError(f"{root} holds no tar files: to pack a folder of images, give OUT, too")
    for path in tars:
        refuse_closed("DATA", path)
        if not path.is_file():  # opening a pipe would wait for its writer
            raise InputError(f"{path} is no file: remove it")
    real: dict[tuple[int, int], Path] = {}
    for path in tars:
        about = path.stat()
        if (other := real.setdefault((about.st_dev, about.st_ino), path)) is not path:
            raise InputError(f"{path} and {other} are the same file by a link: remove one of them")
    if not suffix and (loose := [p for p in root.rglob("*") if is_image(p.name) and p.is_file()]):
        log.warning(
            f"{len(loose)} images beside the tar files are left out, the first of them "
            f"{printable(loose[0])}: to pack a folder of images, give OUT, too"
        )
    counts, names, classes = list[int](), list[str](), list[str]()
    records, faults, others = list[tuple[int, ...]](), list[str](), list[Path]()
    with progress_bar(len(tars), unit="tar file", desc="indexing", keep=False) as bar:
        for number, path in enumerate(tars):
            for name, content, offset, label in samples_in(path, suffix, others):
                fault = None if suffix else image_fault(content, f"{path}: {name}")
                faults += [fault] if fault else []
                records.append(record(number, offset, content))
                names.append(name)
                classes.append(label)
            counts.append(len(names))
            bar.update()
    refuse_faults(faults)
    if not names:
        raise InputError(f"{tars[0]} holds no {name_of(suffix)}")
    if others:
        log.info(left_out(others))
    if not suffix and len({*classes}) == 1:
        raise InputError(f"all images in {root} have one class ({classes[0]}), and not two")
    if any(classes) and (without := classes.count("")):
        raise InputError(
            f"{without} of {len(classes)} samples have no class (the first: "
            f"{names[classes.index('')]}): give all one, or none"
        )
    if numbers := all(name.isdecimal() and len(name) < 19 for name in classes):
        classes = [str(int(name)) for name in classes]
    if numbers and not suffix:
        if (highest := max(map(int, classes))) >= MOST_CLASSES:
            raise InputError(
                f"the class {highest} would make {highest + 1:,} classes, and a model has an "
                "output for each: number the classes 0, 1, 2 and so on"
            )
        known = [str(number) for number in range(highest + 1)]
    else:
        known = sorted(set(classes), key=int if numbers else None)
    place = {name: number for number, name in enumerate(known)}
    labels = np.array([place[name] for name in classes], np.int32)
    train_count = counts[len(groups[0]) - 1] if len(groups) > 1 else 0
    if len(groups) > 1 and not 0 < train_count < len(names):
        part = root / ("val" if train_count else "train")
        raise InputError(f"the tar files in {part} hold no {name_of(suffix)}")
    if train_count and (new := {*classes[train_count:]} - {*classes[:train_count]}):
        raise InputError(
            f"{root / 'val'} has classes that train/ has not: {', '.join(sorted(new))}"
        )
    table = np.array(records, RECORD)
    header = Header(known, train_count, hash_of_sizes(names, table["size"]))
    listing = Listing(**vars(header), names=Texts.of(names), labels=labels, sizes=table["size"])
    shards = [described(root, str(path.relative_to(root))) for path in tars]
    made = {"of": "tar files that were there", **({"suffix": suffix} if suffix else {})}
    write_index(root, listing, table, shards, made)
    of = f" of {len(known)} classes" if any(known) else ""
    return f"indexed {len(names):,} {name_of(suffix)}{of} in {len(tars)} tar files"


def name_of(suffix: str) -> str:
    """What samples are called in a message."""
    return f"{suffix} files" if suffix else "images"


def samples_in(
    path: Path, suffix: str, others: list[Path]
) -> Iterator[tuple[str, bytes, int, str]]:
    """Name, content, place, class of each image (or file `suffix`) in a tar file of WebDataset.

    The files of a sample follow each other, and have the same name up to the first dot. Files that
    belong to no sample are added to `others`.

    Raises:
        InputError: the tar file is not whole, or holds something that would be left out.
    """

    def key(member: tarfile.TarInfo) -> str:
        parent, _, file = member.name.rpartition("/")
        return f"{parent}/{file.partition('.')[0]}"

    try:
        with tarfile.open(path, "r:") as tar:
            files = (member for member in tar if is_file(member, path))
            for stem, members in groupby(files, key):
                if stem.endswith("/"):  # hidden files; macOS adds ._NAME
                    others += [Path(member.name) for member in members]
                    continue
                image, labels, rest = None, dict[str, str](), list[Path]()
                for member in members:
                    kind = member.name.rpartition("/")[2].partition(".")[2].lower()
                    taken = tar.extractfile(member)
                    content = taken.read() if taken else b""
                    if member.name.endswith(suffix) if suffix else is_image(member.name):
                        if image:
                            raise InputError(
                                f"{path}: {stem.lstrip('/')} has two {name_of(suffix)}: leave one, "
                                "or rename them (a sample's name ends at its first dot)"
                            )
                        image = member.name, content, member.offset_data
                    elif kind in ("cls", "json"):
                        labels |= label_in(member.name, kind, content, path)
                    else:
                        rest.append(Path(member.name))
                if len({*labels.values()}) > 1:
                    raise InputError(f"{path}: {stem.lstrip('/')} has two classes: {labels}")
                label = next(iter(labels.values()), None)
                if image and label is None and not suffix:
                    raise InputError(
                        f"{path}: {image[0]} has no class: add {stem.lstrip('/')}.cls to the tar "
                        "file, with its number"
                    )
                if image:
                    yield *image, label or ""
                elif label is not None:
                    raise InputError(
                        f"{path}: {stem.lstrip('/')} has a class and none of the "
                        f"{name_of(suffix)}, which end in {suffix or ', '.join(sorted(SUFFIXES))}: "
                        "add it to the tar file, beside its class"
                    )
                else:
                    others += rest
            refuse_more(path, tar.offset)
    except (tarfile.TarError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is no tar file as WebDataset makes them ({error})") from None


def label_in(name: str, kind: str, content: bytes, path: Path) -> dict[str, str]:
    """The class that a sample's .cls or .json file gives it, by the file's name; empty: none."""
    try:
        if kind == "cls":
            return {name: _no_negative(content.decode("utf-8-sig").strip())}
        said = json.loads(content)
        said = said if isinstance(said, dict) else {}
        given = [said[n] for n in ("cls", "label", "class") if n in said]
        if given and (isinstance(given[0], bool) or not isinstance(given[0], str | int)):
            raise ValueError(f"a class is a text or a whole number, and not {given[0]}")
        if len({*map(str, given)}) > 1:
            raise ValueError(f"two classes: {given[0]} and {given[1]}")
        return {name: _no_negative(str(given[0]))} if given else {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {name} gives no class ({error})") from None


def _no_negative(label: str) -> str:
    if re.fullmatch(r"-\d+", label):
        raise ValueError(f"{label}: classes are counted from 0; leave out samples without a class")
    return label


def is_file(member: tarfile.TarInfo, path: Path) -> bool:
    """Whether a member is a file, and not a folder. InputError: it is something else."""
    if member.isdir() or (member.isreg() and not member.issparse()):
        return member.isreg()
    what = f"a link to {member.linkname}" if member.islnk() or member.issym() else "no plain file"
    raise InputError(
        f"{path}: {member.name} is {what}: make the tar file with files only (tar --dereference "
        "--hard-dereference)"
    )


def refuse_more(path: Path, end: int) -> None:
    """Raise InputError unless a tar file's members end at `end`, with zeros to the file's end.

    Python's tarfile takes any damaged header for the end.
    """
    with path.open("rb") as file:
        file.seek(end)
        size = 0
        while chunk := file.read(2**20):
            if chunk.count(0) != len(chunk):
                raise InputError(
                    f"{path} is damaged at byte {end:,}, or other bytes follow its end there (tar "
                    f"files that were joined): {RESTORE}"
                )
            size += len(chunk)
    if size < 2 * BLOCK:
        raise InputError(f"{path} is cut off: it does not end as a tar file does: {RESTORE}")


def verify(root: Path) -> str:
    """Compare every image of a pack with its checksum; returns what to say of it.

    Raises:
        InputError: the first damaged one, and how many more there are.
    """
    found, faults = Pack(root, check=True), list[str]()

    def look(index: int) -> None:
        try:
            found.read(index)
        except TrainingError as error:
            faults.append(str(error))

    order = found.in_order_of_the_disk(np.arange(len(found))).tolist()
    bar = progress_bar(len(found), unit="image", desc="verifying", keep=False)
    with bar, ThreadPoolExecutor(usable_cores()) as pool:
        for _ in ahead(pool, look, order):
            bar.update()
    refuse_faults(faults)
    kind = "samples" if found.made.get("suffix") else "images"
    return f"ok: {len(found):,} {kind} in {len(found.shards)} tar files are as they were packed"


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""

    def body() -> int:
        set_up_logs(Ranks())
        parser = Parser("pack", __doc__)
        option = parser.add_argument
        option("data", type=given_path, metavar="DATA", help="folder of images, or of tar files")
        option("out", type=given_path, metavar="OUT", nargs="?", help="folder of the pack")
        option("--verify", action="store_true", help="compare a pack with its checksums")
        option(
            "--suffix", default="", help="the tar files hold samples that end so (.npy), no images"
        )
        option("--shard-mib", type=int, default=1024, help="of a tar file (default %(default)s)")
        option("--largest-side", type=int, metavar="PX", help="resize images with a longer side")
        option("--quality", type=int, default=90, help="of resized JPEGs (default %(default)s)")
        given = parser.parse_args(arguments)
        with input_errors():
            refuse_below(given, shard_mib=1, largest_side=1, quality=1)
            if given.shard_mib > 2**30 or given.quality > 100:
                raise ValueError("--shard-mib must be at most 2^30, and --quality at most 100")
        if given.suffix and (given.verify or given.out):
            raise InputError("--suffix is for tar files that are there: give DATA only")
        if given.verify:
            print(verify(given.out or given.data))
        elif given.out is None:
            print(index(given.data, given.suffix))
        else:
            size, side = given.shard_mib * 2**20, given.largest_side or 0
            try:
                print(pack(given.data, given.out, size, side, given.quality))
            except InputError as error:
                raise InputError(str(error).replace("--data-path", "DATA")) from None
        return 0

    return attempt(body)
