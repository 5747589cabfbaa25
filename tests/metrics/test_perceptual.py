import sys
import warnings

import lpips
import numpy as np
import pytest
import torch
from skimage.transform import resize
from torch import nn

from attacks.registry import UsageError
from fedmjp.metrics import load_lpips
from fedmjp.metrics.perceptual import SHIPPED, SMALLEST


@pytest.fixture(scope="module")
def squeeze():
    """The metric as it ships, in half precision."""
    return load_lpips("squeeze")


@pytest.fixture
def empty_hub(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def no_download(monkeypatch):
    def refuse(url, *_, **__):
        raise AssertionError(f"tried to download {url}")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)


def test_gives_the_values_of_torchmetrics_documentation(squeeze):
    # torchmetrics.functional.image.learned_perceptual_image_patch_similarity, second doctest, net_type="squeeze".
    generator = torch.Generator().manual_seed(42)
    first, second = torch.rand(2, 3, 100, 100, generator=generator), torch.rand(2, 3, 100, 100, generator=generator)
    np.testing.assert_allclose(squeeze(first, second), [0.1024, 0.0938], atol=5e-5)


def test_half_precision_is_within_a_thousandth_of_full(squeeze, lpips_weights, noisy, photographs):
    full = load_lpips("squeeze", lpips_weights)
    np.testing.assert_allclose(squeeze(noisy, photographs), full(noisy, photographs), atol=1e-3)


def test_damaged_weights_are_refused(tmp_path, monkeypatch):
    content = bytearray(SHIPPED.read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(content)
    monkeypatch.setattr("fedmjp.metrics.perceptual.SHIPPED", tmp_path / "damaged.safetensors")
    with pytest.raises(UsageError, match="damaged.safetensors is missing or damaged"):
        load_lpips("squeeze")


def test_agrees_with_the_package_itself(lpips_weights, noisy, photographs):
    squeeze = load_lpips("squeeze", lpips_weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = lpips.LPIPS(net="squeeze", pnet_rand=True, verbose=False)
    package.load_state_dict(torch.load(lpips_weights, weights_only=True))
    with torch.no_grad():
        expected = [package(2 * r[None] - 1, 2 * o[None] - 1).item() for r, o in zip(noisy, photographs, strict=True)]
    np.testing.assert_allclose(squeeze(noisy, photographs), expected, rtol=1e-4)


def test_grows_with_the_noise_and_vanishes_on_identical_images(squeeze, noisy, photographs):
    small, middle, large = squeeze(noisy, photographs).tolist()
    assert 0 < small < middle < large
    assert squeeze(photographs, photographs).tolist() == [0.0, 0.0, 0.0]


def test_grey_images_count_as_rgb_with_equal_channels(squeeze, noisy, photographs):
    rec, orig = noisy[:, :1], photographs[:, :1]
    expected = squeeze(rec.expand(-1, 3, -1, -1), orig.expand(-1, 3, -1, -1))
    np.testing.assert_allclose(squeeze(rec, orig), expected, rtol=1e-5)


def test_the_label_names_the_trunk_and_small_images_give_nan(squeeze, photographs):
    assert squeeze.label == "lpips[squeeze]"
    smallest = photographs[..., :17, :17]
    assert torch.isfinite(squeeze(smallest, 1 - smallest)).all()
    assert torch.isnan(squeeze(smallest[..., :16, :], smallest[..., :16, :])).tolist() == [True, True, True]
    with pytest.raises(UsageError, match="differ"):
        squeeze(smallest, photographs)


@pytest.mark.parametrize(("net", "side"), SMALLEST.items())
def test_the_smallest_sides_are_those_of_the_trunks(net, side):
    # The meta device computes shapes only: no weights are drawn and no convolutions are computed.
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trunk = lpips.LPIPS(net=net, pnet_rand=True, pretrained=False, verbose=False).net
        enough, less = torch.rand(1, 3, side, side), torch.rand(1, 3, side - 1, side - 1)
    assert all(min(features.shape[2:]) > 0 for features in trunk(enough))
    with pytest.raises(RuntimeError, match="too small"):
        trunk(less)


@pytest.mark.parametrize(
    ("net", "trunk"),
    [("alex", "alexnet-owt-7be5be79.pth"), ("vgg", "vgg16-397923af.pth")],
)
def test_without_weights_warns_once_which_file_is_missing(empty_hub, no_download, net, trunk):
    (empty_hub / "checkpoints" / trunk.replace("-", "-other-")).touch()
    with pytest.warns(UserWarning, match=f"{net}.*{trunk}.*--lpips-weights") as caught:
        assert load_lpips(net) is None
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)


def test_takes_the_trunk_from_the_hub_cache(empty_hub, no_download):
    from torchvision.models import alexnet

    trunk = alexnet()
    torch.save(trunk.state_dict(), empty_hub / "checkpoints" / "alexnet-owt-7be5be79.pth")
    cached = load_lpips("alex").network.net
    assert torch.equal(cached.slice1[0].weight, trunk.features[0].weight)
    assert torch.equal(cached.slice5[-2].weight, trunk.features[10].weight)


def test_wrong_weights_raise_one_line(tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "empty.pt").touch()
    for name in ("linear.pt", "list.pt", "text.pt", "empty.pt"):
        with pytest.raises(UsageError, match=f"{name} does not hold the weights") as caught:
            load_lpips("squeeze", tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="no LPIPS weights at"):
        load_lpips("squeeze", tmp_path / "missing.pt")
    with pytest.raises(UsageError, match="unknown LPIPS backbone 'resnet'"):
        load_lpips("resnet")


def test_loading_leaves_the_random_numbers_alone_and_is_silent():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lpips("squeeze")
    assert torch.equal(torch.rand(4), expected)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(UsageError, match="pip install lpips"):
        load_lpips("squeeze")


def test_ranks_blur_and_noise_as_people_do(squeeze, photographs):
    # Zhang et al., figure 1: at an equal squared error, people rate a blurred patch as worse than a noisy one.
    original = photographs[1:2]
    small = resize(original[0].numpy(), (3, 24, 24), anti_aliasing=True)
    blurred = torch.from_numpy(resize(small, (3, 96, 96), order=3).astype("float32"))[None].clamp(0, 1)
    scale = (blurred - original).square().mean().sqrt()
    noise = torch.randn(original.shape, generator=torch.Generator().manual_seed(0))
    assert squeeze(blurred, original) > squeeze((original + scale * noise).clamp(0, 1), original)
