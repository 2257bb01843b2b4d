"""Files that are whole or not there."""

import errno
import json
import os
from pathlib import Path

import pytest

from fulmen.lab.files import write_json, write_text


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_json(path, {"kept": 1})

    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"kept": 2})
    assert json.loads(path.read_text()) == {"kept": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_and_a_device_stay_what_they_are(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    write_text(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    write_text(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()
