"""Test that utilities, file functions, scopes and the visualizer behave as in MMEngine."""

import io
import pickle

import numpy as np
import pytest
from mmengine import fileio, utils
from mmengine.config import Config
from mmengine.registry import TRANSFORMS, DefaultScope, Registry
from mmengine.visualization import Visualizer

from slipstream.errors import ConfigError, DataError, MissingPackageError
from slipstream.registry import TRANSFORMS as OWN_TRANSFORMS


def test_versions_compare_like_numbers():
    ordered = ["0.9.1", "1.2.0.dev3", "1.2.0a1", "1.2.0rc1", "1.2", "1.2.0.post1", "2.13.0+cpu", "10.0"]
    assert sorted(ordered, key=utils.digit_version) == ordered
    assert utils.digit_version("2.13.0+cpu") == (2, 13, 0, 0, 0, 0)


def test_types_are_checked_and_converted():
    assert utils.to_2tuple(3) == (3, 3)
    assert utils.to_2tuple([1, 2]) == (1, 2)
    assert utils.is_list_of([1, 2], int)
    assert not utils.is_list_of((1, 2), int)
    assert utils.is_seq_of((1, "a"), (int, str))
    assert utils.slice_list([1, 2, 3], [2, 1]) == [[1, 2], [3]]
    with pytest.raises(ValueError, match="add up to 4"):
        utils.slice_list([1, 2, 3], [2, 2])


def test_old_argument_names_still_work():
    @utils.deprecated_api_warning({"old": "new"}, cls_name="Layer")
    def function(new):
        return new

    with pytest.warns(DeprecationWarning, match=r"'old' of Layer\.function"):
        assert function(old=4) == 4


def test_error_names_a_missing_package():
    @utils.requires_package("nowhere_to_be_found")
    def function():
        return 1

    with pytest.raises(MissingPackageError, match="function requires nowhere_to_be_found"):
        function()


def test_files_are_listed_recursively(tmp_path):
    for name in ("a.txt", "sub/b.txt", "sub/c.png", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert sorted(utils.scandir(tmp_path, ".txt", recursive=True)) == ["a.txt", "sub/b.txt"]
    found = fileio.list_dir_or_file(tmp_path, list_dir=True, recursive=True)
    assert sorted(found) == ["a.txt", "sub", "sub/b.txt", "sub/c.png"]


def test_the_newest_instance_is_the_current_one():
    class Thing(utils.ManagerMixin):
        def __init__(self, name, size=1):
            super().__init__(name)
            self.size = size

    with pytest.raises(RuntimeError, match="no Thing has been created"):
        Thing.get_current_instance()
    first = Thing.get_instance("first", size=3)
    second = Thing.get_instance("second")
    assert Thing.get_instance("first") is first
    assert Thing.get_current_instance() is second
    assert Thing.check_instance_created("first")


@pytest.mark.parametrize("suffix", ["json", "yaml", "pkl"])
def test_dumped_values_can_be_loaded(tmp_path, suffix):
    path = tmp_path / "folder" / f"values.{suffix}"
    fileio.dump({"a": [1, 2.5, "x"]}, path)
    assert fileio.load(path) == {"a": [1, 2.5, "x"]}


def test_json_accepts_numpy_values():
    assert (
        fileio.dump({"a": np.float32(0.5), "b": np.arange(2)}, file_format="json")
        == '{"a": 0.5, "b": [0, 1]}'
    )


def test_pickles_with_arrays_are_read_and_others_are_rejected(tmp_path):
    path = tmp_path / "values.pkl"
    fileio.dump([np.arange(3), np.float64(0.5)], path)
    array, number = fileio.load(path)
    assert array.tolist() == [0, 1, 2]
    assert number == 0.5

    class Malicious:
        def __reduce__(self):
            return eval, ("1",)

    with pytest.raises(DataError, match=r"builtins\.eval, which is not loaded"):
        fileio.load(io.BytesIO(pickle.dumps(Malicious())), "pkl")


def test_lines_and_entries_in_text_files_are_read(tmp_path):
    (tmp_path / "lines.txt").write_text("a 1\nb 2 3\n")
    assert fileio.list_from_file(tmp_path / "lines.txt", prefix="/", offset=1) == ["/b 2 3"]
    assert fileio.dict_from_file(tmp_path / "lines.txt") == {"a": "1", "b": ["2", "3"]}


def test_remote_files_use_fsspec():
    pytest.importorskip("fsspec")
    fileio.put_text("hello", "memory://folder/file.txt")
    assert fileio.get_text("memory://folder/file.txt") == "hello"
    assert fileio.list_from_file("memory://folder/file.txt") == ["hello"]
    assert list(fileio.list_dir_or_file("memory://folder")) == ["file.txt"]
    assert fileio.join_path("memory://folder", "file.txt") == "memory://folder/file.txt"
    with pytest.raises(ConfigError, match="petrel"):
        fileio.get("x", {"backend": "petrel"})


def test_a_library_can_register_a_class_under_the_name_of_a_slipstream_class():
    own = OWN_TRANSFORMS.get("Normalize")

    @TRANSFORMS.register_module()
    class Normalize: ...

    library = Registry("transform", parent=TRANSFORMS, scope="a_library")
    assert library.get("Normalize") is Normalize
    assert library.get("slipstream.Normalize") is own
    assert OWN_TRANSFORMS.get("Normalize") is own
    assert OWN_TRANSFORMS.get("mmengine.Normalize") is Normalize


def test_the_default_scope_changes_only_inside_the_block():
    before = DefaultScope.get_current_instance()
    with DefaultScope.overwrite_default_scope("mmengine"):
        assert DefaultScope.get_current_instance().scope_name == "mmengine"
    after = DefaultScope.get_current_instance()
    assert (after and after.scope_name) == (before and before.scope_name)


def test_differences_between_configurations_are_listed_by_line():
    lines = Config.diff(Config({"a": 1, "b": 2}), Config({"a": 1, "b": 3})).splitlines()
    assert [line for line in lines if line[:1] in ("+", "-")] == ["- b = 2", "+ b = 3"]


def test_the_visualizer_draws_on_the_image():
    class Special(Visualizer): ...

    visualizer = Special("special", image=np.zeros((40, 60, 3), np.uint8))
    assert Visualizer.get_current_instance() is visualizer
    assert visualizer.get_image().shape == (40, 60, 3)
    assert visualizer.get_image().max() == 0
    mask = np.zeros((40, 60), bool)
    mask[10:20, 30:50] = True
    picture = visualizer.draw_binary_masks(mask, colors=(200, 100, 0), alphas=0.5).get_image()
    assert picture[15, 40].tolist() == [100, 50, 0]
    assert picture[30, 40].tolist() == [0, 0, 0]
    boxes = np.array([[5.0, 5.0, 20.0, 30.0]])
    picture = visualizer.draw_bboxes(boxes, edge_colors=(0, 255, 0), alpha=1.0).get_image()
    assert picture[15, 4:7, 1].max() > 200


def test_a_visualizer_without_a_folder_skips_backends_that_require_one(tmp_path):
    with pytest.warns(UserWarning, match="not used: LocalVisBackend"):
        visualizer = Visualizer("no folder", vis_backends=[dict(type="LocalVisBackend")])
    assert visualizer._vis_backends == {}
    visualizer = Visualizer(
        "folder", vis_backends=[dict(type="LocalVisBackend", save_dir=str(tmp_path / "own"))]
    )
    assert list(visualizer._vis_backends) == ["LocalVisBackend"]
