"""CIFAR from a user's folder in every layout, nothing trusted; crop and flip the same in every driver."""

import io
import lzma
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from undrift import config
from undrift.data import ArraySource, HeldOut, Pooled, cifar, make
from undrift.data.augment import augmentation
from undrift.data.source import Pixels
from undrift.errors import BadInput
from undrift.experiment import build, data
from undrift.planning import Effort, Feed, Planner
from undrift.rng import Stream, Use

OFFICIAL = {"cifar10": ([f"data_batch_{k}" for k in range(1, 6)], "test_batch"), "cifar100": (["train"], "test")}
INSIDE = {
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar10", "pickled"): "cifar-10-batches-py",
    ("cifar100", "binary"): "cifar-100-binary",
    ("cifar100", "pickled"): "cifar-100-python",
}
CLASSES = {"cifar10": 10, "cifar100": 100}
LAYOUTS = ["binary", "pickled", "python 3", "compact"]
IID = {"name": "iid", "clients": 5}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDRIFT_CACHE", str(folder))
        patch.delenv("UNDRIFT_DATA", raising=False)
        yield folder


# Small folders in each layout


def some(name, n, seed):
    """Images [n, 3, 32, 32] with smooth parts and noise, and classes."""
    draws = np.random.default_rng(seed)
    x = draws.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
    x[: n // 2] = np.arange(32, dtype=np.uint8) * 3 + x[: n // 2, :, :1, :1] // 2
    return x, draws.integers(0, CLASSES[name], n)


def train_and_test(name):
    return some(name, 23, 1), some(name, 7, 2)


def binary(name, x, y):
    head = [] if name == "cifar10" else [np.full((len(y), 1), 7)]  # the coarse class
    return np.concatenate([*head, y[:, None], x.reshape(len(x), -1)], 1).astype(np.uint8).tobytes()


def labels_key(name):
    return "labels" if name == "cifar10" else "fine_labels"


def python2_pickle(name, x, y, by_columns=False):
    """As Python 2 wrote the official batches, opcode by opcode."""

    def text(s):
        return b"U" + bytes([len(s)]) + s.encode()

    def whole(i):
        return b"J" + struct.pack("<i", i)

    rows = x.reshape(len(x), -1)
    raw = rows.tobytes("F" if by_columns else "C")
    made = b"cnumpy.core.multiarray\n_reconstruct\nq\x01(cnumpy\nndarray\nK\x00\x85" + text("b") + b"tR"
    kind = b"cnumpy\ndtype\n(" + text("u1") + b"K\x00K\x01tR(K\x03" + text("|") + b"NNN" + 2 * whole(-1) + b"K\x00tb"
    shape = whole(rows.shape[0]) + whole(rows.shape[1]) + b"\x86"
    flag = b"\x88" if by_columns else b"\x89"
    array = made + b"(K\x01" + shape + kind + flag + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    labels = b"](" + b"".join(map(whole, y.tolist())) + b"e"
    files = b"](" + text("a_s_0.png") + b"e"
    items = [text("batch_label"), text("of 5"), text(labels_key(name)), labels, text("data"), array, text("filenames")]
    return b"\x80\x02}(" + b"".join(items) + files + b"u."


def python3_pickle(name, x, y):
    return pickle.dumps({"data": x.reshape(len(x), -1), labels_key(name): y.tolist()}, protocol=2)


def compact(x, y):
    """A compact chunk, lossless."""
    a = x.astype(np.int16).transpose(1, 0, 2, 3)[[1, 0, 2]].copy()
    a[1:] -= a[:1]
    p = np.pad(a, ((0, 0), (0, 0), (1, 0), (1, 0)))
    left, up, corner = p[:, :, 1:, :-1], p[:, :, :-1, 1:], p[:, :, :-1, :-1]
    r = (a - np.clip(left + up - corner, np.minimum(left, up), np.maximum(left, up))).astype(np.int8)
    f = io.BytesIO()
    np.save(f, np.asarray(y, np.uint8))
    np.save(f, ((r << 1) ^ (r >> 7)).view(np.uint8))
    return lzma.compress(f.getvalue(), format=lzma.FORMAT_XZ, preset=1)


def write(folder, name, layout):
    """A folder of 23 and 7 images; returns the path of the first training file."""
    train, test = train_and_test(name)
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "compact":
        for half, (x, y), pieces in (("train", train, 3), ("test", test, 2)):
            for k, rows in enumerate(np.array_split(np.arange(len(x)), pieces)):
                (folder / f"{name}-{half}-{k}.xz").write_bytes(compact(x[rows], y[rows]))
        return folder / f"{name}-train-0.xz"
    written = {"binary": binary, "pickled": python2_pickle, "python 3": python3_pickle}[layout]
    suffix = ".bin" if layout == "binary" else ""
    names, held = OFFICIAL[name]
    for file, rows in zip(names, np.array_split(np.arange(len(train[0])), len(names)), strict=True):
        (folder / f"{file}{suffix}").write_bytes(written(name, train[0][rows], train[1][rows]))
    (folder / f"{held}{suffix}").write_bytes(written(name, *test))
    return folder / f"{names[0]}{suffix}"


def source(folder, name="cifar10", **options):
    return make({"name": name, "folder": str(folder), "partition": IID, **options}, seed=0)


def refused(f, *args, **options):
    with pytest.raises(BadInput) as error:
        f(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# What is read


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_arrays(tmp_path, name, layout):
    write(tmp_path, name, layout)
    found = source(tmp_path, name)
    (x, y), (xt, yt) = train_and_test(name)
    assert found.classes == CLASSES[name] and found.population == 5 and found.examples == 23
    assert np.array_equal(found.arrays[0].numpy(), x) and np.array_equal(found.arrays[1].numpy(), y)
    images, labels = found.test()
    assert images.dtype == torch.float32 and torch.equal(images, torch.from_numpy(xt).float() / 255)
    assert labels.dtype == torch.int64 and np.array_equal(labels.numpy(), yt)


@pytest.mark.parametrize("name, layout", INSIDE)
def test_the_folder_may_hold_the_official_one(tmp_path, name, layout):
    write(tmp_path / INSIDE[name, layout], name, layout)
    assert source(tmp_path, name).examples == 23


def test_both_data_sets_lie_side_by_side(tmp_path):
    write(tmp_path, "cifar10", "compact")
    write(tmp_path, "cifar100", "compact")
    assert source(tmp_path, "cifar10").classes == 10 and source(tmp_path, "cifar100").classes == 100


def test_an_array_by_columns_is_read_as_it_is_meant(tmp_path):
    first = write(tmp_path, "cifar100", "pickled")
    x, y = train_and_test("cifar100")[0]
    first.write_bytes(python2_pickle("cifar100", x, y, by_columns=True))
    assert np.array_equal(source(tmp_path, "cifar100").arrays[0].numpy(), x)


def test_normalise_standardises_by_the_published_numbers(tmp_path):
    write(tmp_path, "cifar10", "binary")
    plain, normal = (source(tmp_path, normalise=n).test()[0].double() for n in (False, True))
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    assert torch.allclose(normal, (plain - mean) / std, atol=1e-3)


def test_some_compact_files_are_a_smaller_data_set_in_the_order_of_their_numbers(tmp_path):
    x, y = some("cifar10", 6, 3)
    for name, rows in (("train-2", [0, 1, 2]), ("train-10", [3, 4]), ("test-1", [5])):
        (tmp_path / f"cifar10-{name}.xz").write_bytes(compact(x[rows], y[rows]))
    found = source(tmp_path)
    assert np.array_equal(found.arrays[0].numpy(), x[:5]) and len(found.test()[1]) == 1
    (tmp_path / "cifar10-test-1.xz").unlink()
    assert "cifar10-test-0.xz is missing; only a part of cifar10 is there" in refused(source, tmp_path)


# What is refused


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("place", ["data", "labels", "other", "inside an array"])
def test_a_pickle_that_calls_is_refused_and_calls_nothing(tmp_path, place, protocol):
    first = write(tmp_path / "c", "cifar10", "python 3")
    evil = Evil(tmp_path / "made")
    if place == "inside an array":
        place, evil = "data", np.array([evil], dtype=object)
    batch = {"data": np.zeros((1, 3072), np.uint8), "labels": [1], place: evil}
    first.write_bytes(pickle.dumps(batch, protocol))
    said = refused(source, tmp_path / "c")
    assert f"{first} is refused: it asks for" in said and "mkdir" in said
    assert not (tmp_path / "made").exists()
    pickle.loads(first.read_bytes())
    assert (tmp_path / "made").exists()  # it would have


@pytest.mark.parametrize(
    "asks, names",
    [
        (b"cnumpy\nload\n.", "numpy.load"),
        (b"cnumpy.core.multiarray\nfromfile\n.", "numpy.core.multiarray.fromfile"),
        (b"c_codecs\ndecode\n.", "_codecs.decode"),
        (b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.", "numpy.ndarray.__init__"),
        (b"(ibuiltins\neval\n.", "builtins.eval"),
        (b"Pelsewhere\n.", "an object kept elsewhere"),
    ],
)
def test_a_pickle_names_nothing_but_parts_of_an_array(tmp_path, asks, names):
    first = write(tmp_path, "cifar10", "pickled")
    first.write_bytes(asks)
    assert names in refused(source, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1]},
        {"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]},
        {"data": np.zeros((2, 3072)), "labels": [1, 2]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, None]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, -1]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2**70]},
        {"data": np.zeros((0, 3072), np.uint8), "labels": []},
        {"data": np.full((2, 3072), None), "labels": [1, 2]},
        {"data": b"abc", "labels": [1, 2]},
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path, content):
    first = write(tmp_path, "cifar10", "python 3")
    first.write_bytes(pickle.dumps(content, 4))
    assert f"{first} is damaged" in refused(source, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9999])
def test_a_truncated_file_is_refused_by_name(tmp_path, layout, share):
    first = write(tmp_path, "cifar100", layout)
    whole = first.read_bytes()
    first.write_bytes(whole[: int(share * len(whole))])
    assert f"{first} is damaged" in refused(source, tmp_path, "cifar100")


def test_a_compact_file_of_other_images_is_refused(tmp_path):
    first = write(tmp_path, "cifar10", "compact")
    x, y = some("cifar10", 4, 5)
    for wrong in (compact(x[:, :, :28, :28], y), compact(x, y[:3]), compact(x, y + 10), lzma.compress(b"PK\3\4")):
        first.write_bytes(wrong)
        assert f"{first} is damaged" in refused(source, tmp_path)


def test_a_folder_without_the_files_is_refused_with_what_was_looked_for(tmp_path):
    looked = (
        "data_batch_1 to 5 and test_batch (with .bin or without), or cifar10-train-0.xz, cifar10-test-0.xz and so on"
    )
    no_folder = refused(make, {"name": "cifar10", "partition": IID}, seed=0)
    assert no_folder.startswith("data.folder is missing") and "UNDRIFT_DATA" in no_folder and looked in no_folder
    empty = refused(source, tmp_path)
    assert empty.startswith(f"data.folder: {tmp_path} holds no cifar10; looked for {looked}")
    assert "cifar-10-batches-py" in empty
    assert "looked for train and test (with" in refused(source, tmp_path, "cifar100")
    assert "data.folder: there is no" in refused(source, tmp_path / "nowhere")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    assert "cifar-10-python.tar.gz is an archive; unpack it" in refused(source, tmp_path)
    assert "is an archive; unpack it" in refused(source, tmp_path / "cifar-10-python.tar.gz")
    (tmp_path / "file").write_text("")
    assert "is no folder" in refused(source, tmp_path / "file")
    write(tmp_path, "cifar10", "binary")
    (tmp_path / "data_batch_3.bin").unlink()
    assert "data_batch_3.bin is missing; only a part of cifar10 is there" in refused(source, tmp_path)


# Where it is looked for


def test_the_environment_names_the_folder_where_the_configuration_does_not(tmp_path, monkeypatch):
    write(tmp_path / "there", "cifar10", "binary")
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path / "there"))
    assert make({"name": "cifar10", "partition": IID}, seed=0).examples == 23
    (tmp_path / "empty").mkdir()
    assert "data.folder" in refused(source, tmp_path / "empty")  # what is typed counts
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path / "nowhere"))
    assert "UNDRIFT_DATA:" in refused(make, {"name": "cifar10", "partition": IID}, seed=0)


def test_a_relative_folder_lies_beside_the_toml_or_in_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path / "toml" / "images", "cifar10", "binary")
    (tmp_path / "toml" / "e.toml").write_text('data = {name = "cifar10", folder = "images", partition.name = "iid"}')
    e = config.read(tmp_path / "toml" / "e.toml", ["data.partition.clients=3"])
    assert data(e).population == 3
    monkeypatch.chdir(tmp_path / "toml")
    assert source("images").population == 5


def test_only_data_sets_that_are_read_from_a_folder_take_one(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def plain(): return torch.zeros(10, 2), torch.arange(10) % 2\n"
        "def read(folder, scale=1.0): return torch.full((10, 2), float(folder is not None)), torch.arange(10) % 2\n"
    )
    partition = {"name": "iid", "clients": 2}

    def own(name, **table):
        return data(config.parse({"data": {"name": name, **table}}, tmp_path))

    assert "data.folder: mnist comes with undrift" in refused(own, "mnist", folder=".", partition=partition)
    assert "data.folder: own:plain has no such setting" in refused(own, "own:plain", folder=".", partition=partition)
    assert own("own:read", folder=".", partition=partition).client(0)[0].sum() == 10
    assert own("own:read", partition=partition).client(0)[0].sum() == 0


def test_the_decoded_copy_is_taken_the_second_time_and_never_for_other_files(tmp_path, monkeypatch):
    first = write(tmp_path, "cifar10", "compact")
    fresh = source(tmp_path)

    def decode(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(cifar, "_decode", decode)
    again = source(tmp_path)
    assert torch.equal(again.arrays[0], fresh.arrays[0]) and torch.equal(again.test()[0], fresh.test()[0])
    x, y = some("cifar10", 8, 9)
    first.write_bytes(compact(x, y))
    with pytest.raises(AssertionError, match="decoded again"):
        source(tmp_path)


# Augmentation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    write(folder, "cifar10", "compact")
    return folder


def views(image):
    """All that crop and flip can make of an image [3, 32, 32], in the order of (top, left, flip)."""
    framed = np.pad(image, ((0, 0), (4, 4), (4, 4)))
    crops = [framed[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
    return np.stack([v for c in crops for v in (c, c[:, :, ::-1])])


@pytest.mark.parametrize("normalise", [False, True])
def test_crop_and_flip_make_every_view_and_no_other(normalise):
    x, y = some("cifar10", 2, 4)
    present = cifar.CIFAR10.standard if normalise else Pixels()
    n = 4000
    words = torch.from_numpy(Stream(0, Use.AUGMENT, 0, 0).words(4 * n, np.arange(2)).reshape(2, n, 4))
    raw = torch.from_numpy(x)[:, None].expand(2, n, 3, 32, 32)
    images, labels = present((raw, torch.from_numpy(y)[:, None].expand(2, n)))
    made, same = augmentation("crop-flip", present, 3)((images, labels), words)
    assert made.shape == images.shape and made.dtype == images.dtype and same is labels
    for c in (0, 1):  # the border is black before images are standardised
        possible = present((torch.from_numpy(views(x[c])), torch.zeros(162)))[0]
        number = {v.numpy().tobytes(): k for k, v in enumerate(possible)}
        assert len(number) == 162
        counts = np.bincount([number[v.numpy().tobytes()] for v in made[c]], minlength=162)
        assert counts.min() > 0 and counts.max() < 60  # about 25 each


def test_the_ends_of_the_words_are_the_ends_of_the_views():
    x, _ = some("cifar10", 1, 4)
    words = torch.tensor([[0, 0, 0, 0], [2**32 - 1] * 4])
    images = torch.from_numpy(x).double().expand(2, 3, 32, 32)
    made, _ = augmentation("crop-flip", Pixels(), 3)((images, torch.zeros(2)), words)
    assert np.array_equal(made.numpy(), views(x[0])[[0, 161]])


def feed(source, clients, round=2, seed=5):
    """Four steps of batch 3: unequal sizes give short batches, which are drawn in unequal widths."""
    plan = Planner(source, None, Effort(3, steps=4), seed, 1)
    return Feed(plan, round, clients, np.full(len(clients), 4))


def test_a_samples_draw_depends_on_nothing_beside_it(folder):
    changed = source(folder, augment="crop-flip")
    assert set(changed.sizes(np.arange(5))) == {4, 5}
    together = feed(changed, [0, 1, 2, 3, 4])
    narrow = 0
    for i in range(5):
        alone = feed(changed, [i])
        for k in range(4):
            one, many = alone.batch(k), together.batch(k)
            width = one.weight.shape[1]
            narrow += width < many.weight.shape[1]
            assert torch.equal(one.samples[0][0], many.samples[0][i, :width])
    assert narrow


def test_every_step_round_client_and_seed_has_draws_of_its_own(folder):
    x, y = (t[:1].expand(5, *t.shape[1:]) for t in source(folder).arrays)
    same = ArraySource((x, y), [np.arange(5)] * 2, None, None, 10, Pixels(), augmentation("crop-flip", Pixels(), 3))
    batches = [feed(same, [0, 1]).batch(k).samples[0][i] for k in range(2) for i in range(2)]
    batches += [feed(same, [0], round=3).batch(0).samples[0][0], feed(same, [0], seed=6).batch(0).samples[0][0]]
    stacked = [v.numpy().tobytes() for b in batches for v in b[:2]]
    assert len(set(stacked)) >= len(stacked) - 1  # of 162 views each, two of these twelve may meet
    again = feed(same, [0, 1])
    assert torch.equal(again.batch(1).samples[0], again.batch(1).samples[0])


@pytest.mark.parametrize("wrapped", [lambda s: s, lambda s: HeldOut(s, 0.3, 0), Pooled])
def test_only_mini_batches_are_changed(folder, wrapped):
    plain, changed = (wrapped(source(folder, **o)) for o in ({}, {"augment": "crop-flip"}))
    batches = [feed(s, [0]).batch(0) for s in (plain, changed)]
    assert not torch.equal(batches[0].samples[0], batches[1].samples[0])
    assert torch.equal(batches[0].samples[1], batches[1].samples[1])
    for (a, n), (b, m) in zip(*(feed(s, [0]).full() for s in (plain, changed)), strict=True):
        assert n == m and torch.equal(a.samples[0], b.samples[0])
    for held in (lambda s: s.test(), lambda s: s.client(0), lambda s: s.validation(0)):
        a, b = held(plain), held(changed)
        assert a is b is None or torch.equal(a[0], b[0])


def experiment(folder, **tables):
    return config.parse({
        "data": {"name": "cifar10", "folder": str(folder), "partition": IID, "augment": "crop-flip", "normalise": True},
        "model": {"name": "logistic"},
        "local": {"lr": 0.01, "epochs": 2, "batch": 3},
        "participation": {"clients": 5},
        **tables,
    })  # fmt: skip


def played(e):
    built = build(e)
    for _ in range(2):
        built.simulation.keep(built.simulation.play())
    return built.simulation.model(), built.evaluate


@pytest.mark.parametrize("method", ["fedavg", "mime", "centralised"])
def test_loop_and_vmap_in_any_chunks_agree(folder, method):
    def model(engine, chunk, **data):
        e = experiment(folder, run={"engine": engine, "chunk": chunk, "precision": "float64"}, algorithm=method_table)
        return played(config.parse(config.derive(config.document(e), data)))[0]

    method_table = {"name": method}
    loop = model("loop", 1)
    for chunk in (1, 2, 5):
        assert (model("vmap", chunk) - loop).abs().max() <= 1e-10 * loop.abs().max()
    data = {"name": "cifar10", "folder": str(folder), "partition": IID, "normalise": True}
    assert (model("loop", 1, data=data) - loop).abs().max() > 1e-3 * loop.abs().max()


def test_what_is_evaluated_is_not_changed(folder):
    validation = {"data.validation": 0.3}
    e = config.derive(config.document(experiment(folder)), validation)
    x, evaluate = played(config.parse(e))
    clean = {k: v for k, v in e["data"].items() if k != "augment"}
    assert evaluate(x) == build(config.parse({**e, "data": clean})).evaluate(x)


def test_an_unknown_augmentation_is_refused(folder):
    assert 'data.augment must be "crop-flip"' in refused(source, folder, augment="crop")
    assert "data.augment" in refused(make, {"name": "synthetic", "augment": "crop-flip"}, seed=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_same_views(folder):
    changed = source(folder, augment="crop-flip")
    plan = Planner(changed.to("cuda"), None, Effort(3, steps=4), 5, 1, device="cuda")
    on_gpu = Feed(plan, 2, [0, 1, 2], np.full(3, 4)).batch(1).samples[0].cpu()
    assert torch.allclose(on_gpu, feed(changed, [0, 1, 2]).batch(1).samples[0], atol=1e-6)
