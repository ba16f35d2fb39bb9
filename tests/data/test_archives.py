import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from npbml.data.archives import Files, open_files, unpack
from npbml.errors import DataError

OUTSIDE = ("../evil.txt", "a/../../evil.txt", "/tmp/npbml-evil.txt", "..\\evil.txt", "C:\\evil.txt", "..")


def make_tar(path: Path, *members: tarfile.TarInfo | tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            entry = tarfile.TarInfo(member[0])
            entry.size = len(member[1])
            tar.addfile(entry, io.BytesIO(member[1]))
    return path


def make_zip(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in members:
            packed.writestr(name, content)
    return path


def contents(files: Files) -> dict[str, bytes]:
    return {member.path: member.read() for member in files}


def tree(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.zip"])
def test_an_archive_reads_as_its_folder_does(name: str, tmp_path: Path) -> None:
    members = (("top/one.txt", b"1"), ("top/deep/two.txt", b"22"))
    make = make_zip if name.endswith("zip") else make_tar
    archive = make(tmp_path / name, *members)
    assert contents(open_files(archive, (), tmp_path / "room")) == dict(members)
    unpack(archive, tmp_path / "out")
    assert contents(open_files(tmp_path / "out", (), tmp_path / "room")) == dict(members)


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_member_that_leads_outside_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    room = tmp_path / "inner" / "room"
    if kind == "tar":
        archive = make_tar(tmp_path / "evil.tar", ("fine.txt", b"1"), (name, b"2"))
    else:
        archive = make_zip(tmp_path / "evil.zip", ("fine.txt", b"1"), (name, b"2"))
    for act in (lambda: unpack(archive, room), lambda: open_files(archive, (), room)):
        with pytest.raises(DataError, match=r"evil\.(tar|zip) is refused: its member .* outside"):
            act()
    assert tree(tmp_path) <= {archive.name, "inner/room/fine.txt", f"inner/room/{archive.name}/fine.txt"}
    assert not Path("/tmp/npbml-evil.txt").exists()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "link"),
        (tarfile.LNKTYPE, "link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.FIFOTYPE, "device"),
    ],
)
def test_links_and_devices_in_a_tar_are_refused(kind: bytes, said: str, tmp_path: Path) -> None:
    entry = tarfile.TarInfo("way-out")
    entry.type, entry.linkname = kind, "../outside"
    archive = make_tar(tmp_path / "evil.tar", entry, ("way-out/file.txt", b"2"))
    with pytest.raises(DataError, match=f"member 'way-out' is a {said}"):
        unpack(archive, tmp_path / "room")
    assert tree(tmp_path) == {"evil.tar"}


def test_links_in_a_zip_are_refused(tmp_path: Path) -> None:
    entry = zipfile.ZipInfo("way-out")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive = make_zip(tmp_path / "evil.zip", (entry, b"../outside"))
    with pytest.raises(DataError, match="member 'way-out' is a link"):
        unpack(archive, tmp_path / "room")
    assert tree(tmp_path) == {"evil.zip"}


@pytest.mark.parametrize("name", ["cut.tar.gz", "cut.tar", "cut.zip"])
def test_a_damaged_archive_is_named(name: str, tmp_path: Path) -> None:
    make = make_zip if name.endswith("zip") else make_tar
    archive = make(tmp_path / name, ("a.bin", bytes(range(256)) * 40))
    archive.write_bytes(archive.read_bytes()[: 300 if name.endswith("gz") else 5000])
    with pytest.raises(DataError, match=rf"{name} cannot be unpacked"):
        unpack(archive, tmp_path / "room")


def test_a_damaged_member_is_named(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", ("one.txt", b"unmistakable"))
    archive.write_bytes(archive.read_bytes().replace(b"unmistakable", b"Unmistakable"))
    (member,) = open_files(archive, (), tmp_path / "room")
    with pytest.raises(DataError, match=r"one\.txt in .*a\.zip cannot be read"):
        member.read()


def test_archives_in_a_folder_are_read_when_their_name_says_so(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    make_zip(tmp_path / "in" / "wanted.zip", ("a/one.txt", b"1"))
    make_zip(tmp_path / "in" / "other.zip", ("b/two.txt", b"2"))
    paths = {member.path for member in open_files(tmp_path / "in", ("wanted*",), tmp_path / "room")}
    assert paths == {"wanted.zip", "other.zip", "a/one.txt"}
    (tmp_path / "in" / "a").mkdir()
    (tmp_path / "in" / "a" / "one.txt").write_bytes(b"1")
    files = open_files(tmp_path / "in", ("wanted*",), tmp_path / "room")
    assert [member.path for member in files].count("a/one.txt") == 1


def test_links_of_the_users_own_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.txt").write_bytes(b"1")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "data").symlink_to(tmp_path / "data")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in")
    assert contents(open_files(tmp_path / "in", (), tmp_path)) == {"data/one.txt": b"1"}


def test_files_are_found_by_name_and_together(tmp_path: Path) -> None:
    for path in (
        "x/y/train.csv",
        "x/y/val.csv",
        "x/train.csv",
        "z/w/v/train.csv",
        "z/w/v/val.csv",
        "x/._train.csv",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"")
    files = open_files(tmp_path, (), tmp_path)
    assert [member.path for member in files.named("tr*.csv")] == [
        "x/train.csv",
        "x/y/train.csv",
        "z/w/v/train.csv",
    ]
    assert [member.path for member in files.together("train.csv", "val.csv") or ()] == [
        "x/y/train.csv",
        "x/y/val.csv",
    ]
    assert files.together("train.csv", "test.csv") is None


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no .*nowhere"):
        open_files(tmp_path / "nowhere", (), tmp_path)
