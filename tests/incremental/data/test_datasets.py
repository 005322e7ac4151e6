"""Readers of datasets, on real and generated files."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tcil.incremental.data.datasets import cifar, load_dataset
from tcil.incremental.data.datasets.files import read_pickle
from tcil.incremental.data.datasets.pictures import decode


@pytest.fixture
def cifar10_folder(tmp_path):
    """A miniature in CIFAR-10's format: Python 2 pickles with bytes keys."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        record = {b"data": rng.integers(0, 256, (20, 3072), dtype=np.uint8), b"labels": [i % 10 for i in range(20)]}
        (folder / name).write_bytes(pickle.dumps(record, protocol=2))
    (folder / "batches.meta").write_bytes(
        pickle.dumps({b"label_names": [b"class%d" % i for i in range(10)]}, protocol=2)
    )
    return tmp_path


def believed(folder, monkeypatch):
    """What is in this folder is taken for the release."""
    files = sorted((folder / "cifar-10-batches-py").iterdir())
    monkeypatch.setattr(cifar, "_CIFAR10", {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in files})


class TestCifar:
    def test_reader(self, cifar10_folder, monkeypatch):
        believed(cifar10_folder, monkeypatch)
        data = cifar.load_cifar10(cifar10_folder)
        assert (len(data.train), len(data.test), data.n_classes) == (100, 20, 10)
        assert data.class_names[3] == "class3"
        raw = pickle.loads((cifar10_folder / "cifar-10-batches-py" / "data_batch_2").read_bytes())
        assert data.train.images[20].flatten().tolist() == raw[b"data"][0].tolist()

    def test_normalised_as_the_authors_do(self, cifar10_folder, monkeypatch):
        believed(cifar10_folder, monkeypatch)
        data = cifar.load_cifar10(cifar10_folder)
        assert (data.mean, data.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
        assert data.fingerprint()["revision"] == 2  # runs with the deviations of before are not continued
        assert "revision" not in dataclasses.replace(data, revision=1).fingerprint()

    def test_checksums(self, cifar10_folder):
        with pytest.raises(ValueError, match=r"data_batch_1 with the checksum .*It is damaged.*tcil download cifar10"):
            load_dataset("cifar10", cifar10_folder)

    def test_checksums_of_the_class_names(self, cifar10_folder, monkeypatch):
        folder = cifar10_folder / "cifar-10-batches-py"
        believed(cifar10_folder, monkeypatch)
        assert len(load_dataset("cifar10", cifar10_folder).train) == 100
        (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"x"] * 10}, protocol=2))
        with pytest.raises(ValueError, match=r"data: got .*batches\.meta with the checksum .*tcil download cifar10"):
            load_dataset("cifar10", cifar10_folder)

    def test_checksums_of_the_class_names_of_cifar100(self, tmp_path, monkeypatch):
        folder = tmp_path / "cifar-100-python"
        folder.mkdir()
        record = {b"data": np.zeros((2, 3072), dtype=np.uint8), b"fine_labels": [0, 1], b"fine_label_names": [b"a"] * 9}
        for name in ("train", "test", "meta"):
            (folder / name).write_bytes(pickle.dumps(record, protocol=2))
        right = hashlib.md5((folder / "train").read_bytes()).hexdigest()
        monkeypatch.setattr(cifar, "_CIFAR100", {"train": right, "test": right, "meta": "0" * 32})
        with pytest.raises(ValueError, match=r"data: got .*meta with the checksum .*tcil download cifar100"):
            load_dataset("cifar100", tmp_path)

    def test_missing_folder(self, tmp_path):
        with pytest.raises(ValueError, match=r"data: got no .*cifar-100-python.*tcil download cifar100"):
            load_dataset("cifar100", tmp_path)
        with pytest.raises(ValueError, match=r"data: got no folder.*--data DIR"):
            load_dataset("cifar100")

    def test_pickles_with_code_are_refused(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path}/owned",)

        (tmp_path / "evil").write_bytes(pickle.dumps({b"data": Evil()}, protocol=2))
        with pytest.raises(ValueError, match="is not allowed in a data file"):
            read_pickle(tmp_path / "evil")
        assert not (tmp_path / "owned").exists()

    def test_truncated(self, cifar10_folder, monkeypatch):
        path = cifar10_folder / "cifar-10-batches-py" / "test_batch"
        path.write_bytes(path.read_bytes()[:1000])
        believed(cifar10_folder, monkeypatch)
        with pytest.raises(ValueError, match="cannot be read"):
            cifar.load_cifar10(cifar10_folder)


def picture(path, side, grey=False, seed=0):
    rng = np.random.default_rng(seed)
    shape = (side, side) if grey else (side, side, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)


class TestPictures:
    def tiny(self, root):
        for c, name in enumerate(("n01", "n02")):
            for i in range(3):
                picture(root / "train" / name / "images" / f"{name}_{i}.JPEG", 64, grey=i == 0, seed=c * 10 + i)
        for i in range(2):
            picture(root / "val" / "images" / f"val_{i}.JPEG", 64, seed=99 + i)
        (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1\n")
        (root / "wnids.txt").write_text("n02\nn01\n")
        (root / "words.txt").write_text("n01\tfirst thing, other\nn02\tsecond thing\n")

    def test_tiny_imagenet(self, tmp_path):
        self.tiny(tmp_path / "tiny-imagenet-200")
        data = load_dataset("tiny-imagenet", tmp_path)
        assert data.class_names == ("second thing", "first thing")  # the order of wnids.txt
        assert data.train.images.shape == (6, 3, 64, 64)
        assert data.test.labels.tolist() == [0, 1]
        grey = data.train.images[0]
        assert torch.equal(grey[0], grey[1])
        assert torch.equal(grey[1], grey[2])

    def test_decoded_images_are_kept_until_files_change(self, tmp_path, monkeypatch):
        root = tmp_path / "tiny-imagenet-200"
        self.tiny(root)
        first = load_dataset("tiny-imagenet", tmp_path)
        opened = []
        original = Image.open
        monkeypatch.setattr(Image, "open", lambda *what, **how: opened.append(what) or original(*what, **how))
        again = load_dataset("tiny-imagenet", tmp_path)
        assert not opened
        assert torch.equal(first.train.images, again.train.images)
        picture(root / "train" / "n01" / "images" / "n01_1.JPEG", 64, seed=1234)
        changed = load_dataset("tiny-imagenet", tmp_path)
        assert opened
        assert not torch.equal(first.train.images, changed.train.images)
        (root / "train.cache.safetensors").write_bytes(b"damaged")
        assert torch.equal(load_dataset("tiny-imagenet", tmp_path).train.images, changed.train.images)

    def test_image_folder(self, tmp_path):
        for part, count in (("train", 4), ("test", 2)):
            for c, name in enumerate(("cat", "dog", "eel")):
                for i in range(count):
                    picture(tmp_path / part / name / f"{i}.png", 40 + 8 * i, seed=c)
        data = load_dataset("image-folder", tmp_path)
        assert data.class_names == ("cat", "dog", "eel")
        assert data.train.images.shape == (12, 3, 32, 32)
        (tmp_path / "train" / "cat" / "phone.heic").write_bytes(b"a photo that is not read")
        (tmp_path / "train" / "cat" / ".DS_Store").write_bytes(b"of a system")
        with pytest.warns(UserWarning, match=r"train: 1 file is not read as an image \(\.heic\)"):
            load_dataset("image-folder", tmp_path)
        (tmp_path / "empty" / "train").mkdir(parents=True)
        (tmp_path / "empty" / "test").mkdir()
        with pytest.raises(ValueError, match="0 class folders"):
            load_dataset("image-folder", tmp_path / "empty")

    def test_tiny_imagenet_at_half_its_side(self, tmp_path):
        """Each pixel is the mean of four, rounded twice; both sizes have decoded images of their own."""
        root = tmp_path / "tiny-imagenet-200"
        self.tiny(root)
        whole, half = load_dataset("tiny-imagenet", tmp_path), load_dataset("tiny-imagenet", tmp_path, image_side=32)
        assert half.image_shape == (3, 32, 32)
        means = torch.nn.functional.avg_pool2d(whole.train.images.float(), 2)
        assert (half.train.images.float() - means).abs().max() <= 1
        assert torch.equal(half.train.labels, whole.train.labels)
        caches = {"train.cache.safetensors", "train.cache-32.safetensors"}
        assert {path.name for path in root.glob("train.cache*")} == caches
        assert torch.equal(load_dataset("tiny-imagenet", tmp_path, image_side=32).test.images, half.test.images)

    def test_image_side_of_the_caller(self, tmp_path):
        for part in ("train", "test"):
            for name in ("cat", "dog"):
                picture(tmp_path / part / name / "0.png", 40, seed=0)
        assert load_dataset("image-folder", tmp_path, image_side=16).image_shape == (3, 16, 16)
        assert load_dataset("image-folder", tmp_path).image_shape == (3, 32, 32)
        for side in (0, 10_000):
            with pytest.raises(ValueError, match=f"^image_side: got {side}; expected a whole number of pixels"):
                load_dataset("image-folder", tmp_path, side)
        with pytest.raises(ValueError, match=r"^image_side: got 16 for digits; expected none, or the dataset"):
            load_dataset("digits", image_side=16)

    def folder(self, root, pictures):
        """Two classes of one-coloured pictures, all of one size and date, as an archive unpacks them."""
        for part in ("train", "test"):
            for name, grey in pictures.items():
                for i in range(2):
                    path = root / part / name / f"{i}.bmp"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.new("RGB", (32, 32), (grey,) * 3).save(path)
                    os.utime(path, (1e9, 1e9))

    def greys(self, root):
        data = load_dataset("image-folder", root)
        return {
            name: data.train.images[data.train.labels == i].unique().tolist() for i, name in enumerate(data.class_names)
        }

    def test_a_renamed_class_keeps_its_pictures(self, tmp_path):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        assert self.greys(tmp_path) == {"cat": [10], "dog": [110]}
        for part in ("train", "test"):
            (tmp_path / part / "cat").rename(tmp_path / part / "zebra")
        assert self.greys(tmp_path) == {"dog": [110], "zebra": [10]}

    def test_replaced_pictures_of_one_size_and_date_are_read(self, tmp_path):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        before = load_dataset("image-folder", tmp_path).fingerprint()
        self.folder(tmp_path, {"cat": 10, "dog": 200})
        assert self.greys(tmp_path) == {"cat": [10], "dog": [200]}
        assert load_dataset("image-folder", tmp_path).fingerprint() != before

    def test_a_cache_of_another_shape_is_made_anew(self, tmp_path):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        load_dataset("image-folder", tmp_path)
        cache = tmp_path / "train" / "cache-32.safetensors"
        save_file({**load_file(cache), "images": torch.full((3, 1, 2, 2), 7.5)}, cache)
        assert self.greys(tmp_path) == {"cat": [10], "dog": [110]}

    def test_a_flipped_bit_of_decoded_images_is_found(self, tmp_path):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        load_dataset("image-folder", tmp_path)
        cache = tmp_path / "train" / "cache-32.safetensors"
        whole, stored = cache.read_bytes(), load_file(cache)
        for place in (-1, -1000):  # of the hash or the images, as safetensors lays them out
            content = bytearray(whole)
            content[place] ^= 0x40
            cache.write_bytes(content)
            assert self.greys(tmp_path) == {"cat": [10], "dog": [110]}
            assert cache.read_bytes() == whole
        stored["images"][0, 0, 0, 0] += 1
        save_file(stored, cache)
        assert self.greys(tmp_path) == {"cat": [10], "dog": [110]}

    def test_decoded_images_of_older_versions_are_decoded_again(self, tmp_path):
        """Their hash was that of the files alone."""
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        images = load_dataset("image-folder", tmp_path).train.images
        cache, digest = tmp_path / "train" / "cache-32.safetensors", hashlib.sha256(b"pictures 2;32;")
        whole = cache.read_bytes()
        for name in ("cat", "dog"):
            for i in range(2):
                digest.update(hashlib.sha256((tmp_path / "train" / name / f"{i}.bmp").read_bytes()).digest())
        key = torch.tensor(list(digest.digest()), dtype=torch.uint8)
        save_file({"images": torch.zeros_like(images), "key": key}, cache)
        assert self.greys(tmp_path) == {"cat": [10], "dog": [110]}
        assert cache.read_bytes() == whole

    @pytest.mark.parametrize("suffix", ["png", "tiff"])
    def test_sixteen_bits_become_eight(self, tmp_path, suffix):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        ramp = np.linspace(0, 65535, 32 * 32).round().astype(np.uint16).reshape(32, 32)
        Image.fromarray(ramp).save(tmp_path / "train" / "cat" / f"2.{suffix}")
        read = load_dataset("image-folder", tmp_path).train.images[2]
        assert (read.double() - torch.from_numpy(ramp / 257)).abs().max() <= 0.5

    def test_images_that_would_be_left_out_are_told(self, tmp_path):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        picture(tmp_path / "test" / "eel" / "0.png", 32, seed=0)
        with pytest.raises(ValueError, match=r"^data: got the class folders \['eel'\] in .*test, which are not in"):
            load_dataset("image-folder", tmp_path)
        (tmp_path / "test" / "eel" / "0.png").unlink()
        (tmp_path / "test" / "eel").rmdir()
        picture(tmp_path / "train" / "cat" / "more" / "still" / "0.png", 32, seed=0)
        with pytest.raises(ValueError, match=r"^data: got .*still.0\.png, an image in a sub-folder of a class"):
            load_dataset("image-folder", tmp_path)

    def test_hidden_and_empty_folders_are_no_classes(self, tmp_path):
        """Such as those that notebooks leave; the folder may be any path-like object."""
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        for part in ("test", "train", "train/cat", "train/cat/more/.hidden"):
            picture(tmp_path / part / ".ipynb_checkpoints" / "0.png", 32, seed=0)
        (tmp_path / "train" / "dog" / "._0.png").write_bytes(b"of a system, no picture")
        (tmp_path / "test" / "empty").mkdir()

        class Place:
            def __fspath__(self):
                return str(tmp_path)

        data = load_dataset("image-folder", Place())
        assert data.class_names == ("cat", "dog")
        assert len(data.train) == len(data.test) == 4

    def test_a_strip_does_not_fill_the_memory(self, tmp_path):
        """Scaled to 64 pixels in height, it would have 64 million in width."""
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        Image.new("L", (10**6, 1)).save(tmp_path / "train" / "cat" / "2.png")
        with pytest.raises(ValueError, match=r"2\.png, which cannot be decoded \(it is 1000000 x 1 pixels, too long"):
            load_dataset("image-folder", tmp_path, image_side=64)

    @pytest.mark.parametrize("folder", [5, b"data", ["data"]])
    def test_folders_that_are_no_paths(self, folder):
        with pytest.raises(ValueError, match=r"^data: got .*the path of a folder"):
            load_dataset("image-folder", folder)

    @pytest.mark.parametrize("kind", [np.float32, np.int32])
    def test_numbers_of_no_known_range_are_refused(self, tmp_path, kind):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        Image.fromarray(np.ones((32, 32), kind)).save(tmp_path / "train" / "cat" / "2.tiff")
        with pytest.raises(ValueError, match=r"^data: got .*2\.tiff, which cannot be decoded \(.*8 or 16 bits"):
            load_dataset("image-folder", tmp_path)

    def test_no_program_is_started_for_a_picture(self, tmp_path, monkeypatch):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
        (tmp_path / "train" / "cat" / "2.png").write_bytes(page)
        started = []
        monkeypatch.setattr("subprocess.Popen", lambda *what, **how: started.append(what))
        with pytest.raises(ValueError, match=r"^data: got .*2\.png, which cannot be decoded \(not one of PNG, JPEG"):
            load_dataset("image-folder", tmp_path)
        assert not started

    @pytest.mark.parametrize("name", ["cat/2.png", "cache-32.safetensors"])
    def test_pipes_are_not_waited_for(self, tmp_path, name):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        os.mkfifo(tmp_path / "train" / name)
        with pytest.raises(ValueError, match=rf"^data: got .*{name}, which "):
            load_dataset("image-folder", tmp_path)

    def test_a_link_to_a_device_is_refused(self, tmp_path):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        (tmp_path / "train" / "cat" / "2.png").symlink_to("/dev/zero")
        with pytest.raises(
            ValueError, match=r"^data: got .*2\.png, which cannot be decoded \(It is a pipe or a device"
        ):
            load_dataset("image-folder", tmp_path)

    def test_names_that_are_not_utf8(self, tmp_path):
        self.folder(tmp_path, {"cat": 10, "dog": 110})
        picture = tmp_path / "train" / "cat" / "0.bmp"
        other = Path(os.fsdecode(os.fsencode(picture.parent) + b"/\xff.bmp"))
        picture.rename(other)
        assert self.greys(tmp_path) == {"cat": [10], "dog": [110]}
        other.write_bytes(b"no image")
        with pytest.raises(ValueError, match=r"^data: got .*\\udcff\.bmp, which cannot be decoded") as caught:
            load_dataset("image-folder", tmp_path)
        str(caught.value).encode()

    def test_broken_picture(self, tmp_path):
        self.tiny(tmp_path / "tiny-imagenet-200")
        (tmp_path / "tiny-imagenet-200" / "train" / "n01" / "images" / "n01_2.JPEG").write_bytes(b"no image")
        with pytest.raises(ValueError, match=r"n01_2.JPEG, which cannot be decoded"):
            load_dataset("tiny-imagenet", tmp_path)


def test_unknown_dataset_suggests():
    with pytest.raises(ValueError, match=r"dataset: got 'cifar-100'; expected one of .*Did you mean 'cifar100'"):
        load_dataset("cifar-100")
    with pytest.raises(ValueError, match=r"an importable package\.module:name"):
        load_dataset("no.such:thing")


class TestUnreadable:
    @pytest.mark.parametrize("name", ["tiny-imagenet", "image-folder"])
    def test_a_file_where_a_folder_should_be(self, tmp_path, name):
        for file in ("train", "test", "wnids.txt"):
            (tmp_path / file).write_text("")
        with pytest.raises(ValueError, match=rf"^data: got .*{name} cannot be read \(.*Not a directory.*train"):
            load_dataset(name, tmp_path)

    def test_a_folder_where_a_file_should_be(self, cifar10_folder):
        path = cifar10_folder / "cifar-10-batches-py" / "data_batch_1"
        path.unlink()
        path.mkdir()
        with pytest.raises(ValueError, match=r"^data: got .*Is a directory.*data_batch_1"):
            load_dataset("cifar10", cifar10_folder)

    def test_a_pipe_where_a_file_should_be(self, cifar10_folder):
        path = cifar10_folder / "cifar-10-batches-py" / "data_batch_1"
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(ValueError, match=r"^data: got .*It is a pipe or a device.*data_batch_1"):
            load_dataset("cifar10", cifar10_folder)

    def test_no_permission(self, tmp_path, monkeypatch):
        def refuse(self):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "exists", refuse)  # the tests may run as root, whom no file refuses
        with pytest.raises(
            ValueError, match=r"^data: got .*cifar100 cannot be read .*Permission denied.*expected a fold"
        ):
            load_dataset("cifar100", tmp_path)

    def test_ones_own_dataset(self, tmp_path, monkeypatch):
        (tmp_path / "own_unreadable.py").write_text("def load(folder):\n    return (folder / 'gone').read_bytes()\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ValueError, match=r"^data: got .*No such file.*gone"):
            load_dataset("own_unreadable:load", tmp_path)

    @pytest.mark.parametrize(
        ("train", "test", "message"),
        [
            ([1, 2, 3, 4], [1, 2, 3, 4], r"training images with the labels \[4\]; expected labels from 0 to 3"),
            # -1 would count as the last class
            ([0, 1, 2, 3], [0, 1, -1, -1], r"test images with the labels \[-1\]; .*Leave out images without a label"),
        ],
    )
    def test_ones_own_labels_out_of_range(self, tmp_path, monkeypatch, train, test, message):
        lines = [
            "import torch", "from tcil.extending import Dataset, ImageSet",
            "images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)",
            f"train, test = (ImageSet(images, torch.tensor(labels)) for labels in ({train}, {test}))",
            "def load(folder):", "    return Dataset('own', train, test, ('a', 'b', 'c', 'd'), (0.5,), (0.5,))",
        ]  # fmt: skip
        module = f"own_{'unlabelled' if -1 in test else 'from_one'}"  # a name of its own: modules are kept
        (tmp_path / f"{module}.py").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ValueError, match=message):
            load_dataset(f"{module}:load", tmp_path)


def test_pictures_are_decoded_also_where_no_cache_can_be_written(tmp_path):
    Image.new("RGB", (8, 8), (255, 0, 0)).save(tmp_path / "a.png")
    images = decode([tmp_path / "a.png"], 8, tmp_path / "absent" / "cache.safetensors")
    assert images[0, :, 0, 0].tolist() == [255, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
