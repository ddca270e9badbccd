"""The original's own code (CSAILVision/semantic-segmentation-pytorch), to compare with. It is no part of this repository:
`use(folder)` takes it from a checkout, or from the unpacked package mit_semseg 1.0.0, and lets it run on newer Pythons.
"""
import collections
import collections.abc
import importlib
import pathlib
import sys
import types

import torch

from . import segmentation

FEATURES = {"resnet18": 512, "resnet18dilated": 512, "mobilenetv2dilated": 320, "hrnetv2": 720}


def use(folder):
    """Makes the package mit_semseg of that folder importable."""
    folder = pathlib.Path(folder)
    if not (folder / "mit_semseg").is_dir():
        sys.exit(f"{folder}: no folder mit_semseg here. HINT: pip download --no-deps mit-semseg==1.0.0, and unpack it")
    sys.path.insert(0, str(folder.resolve()))
    for name in ("Mapping", "Sequence"):  # gone from `collections` since Python 3.10
        if not hasattr(collections, name):
            setattr(collections, name, getattr(collections.abc, name))


def part(name):
    return importlib.import_module(f"mit_semseg.{name}")


def build_encoder(name):
    models = part("models.models")
    if name == "hrnetv2":
        return part("models.hrnet").hrnetv2(pretrained=False)
    if name.startswith("mobilenet"):
        return models.MobileNetV2Dilated(part("models.mobilenet").mobilenetv2(pretrained=False))
    if name.startswith("resnext"):
        return models.Resnet(part("models.resnext").resnext101(pretrained=False))
    dilated = name.endswith("dilated")
    net = getattr(part("models.resnet"), name.removesuffix("dilated"))(pretrained=False)
    return models.ResnetDilated(net) if dilated else models.Resnet(net)


def build(encoder, decoder, num_classes, arrays, dropout=0.1, deep_sup_scale=0.4, use_softmax=False):
    """The original's SegmentationModule with these weights ({released name: array}, `encoder.` or `decoder.` in front); a part
    without any is as the original draws it."""
    models = part("models.models")
    nets = {"encoder": build_encoder(encoder),
            "decoder": models.ModelBuilder.build_decoder(arch=decoder, fc_dim=FEATURES.get(encoder, 2048),
                                                         num_class=num_classes, use_softmax=use_softmax)}
    for kind, net in nets.items():
        if given := {n.removeprefix(kind + "."): a for n, a in arrays.items() if n.startswith(kind + ".")}:
            segmentation.load(net, given)
        for module in net.modules():
            if isinstance(module, torch.nn.Dropout2d):
                module.p = dropout
    deep = deep_sup_scale if decoder.endswith("deepsup") else None
    return models.SegmentationModule(nets["encoder"], nets["decoder"], torch.nn.NLLLoss(ignore_index=-1), deep)


def validation_set(root, records, data):
    """Its ValDataset over `records` (dicts as in a line of an .odgt list), for the keys of a deck's [data]."""
    options = types.SimpleNamespace(imgSizes=data["short_sides"], imgMaxSize=data["max_side"],
                                    padding_constant=data["padding"])
    return part("dataset").ValDataset(str(root), list(records), options)


def evaluate(module, item, num_classes):
    """What its evaluation does with one item of that set: predictions, and its counts with its own metrics."""
    utils, label = part("utils"), item["seg_label"][0].numpy()
    size = label.shape
    with torch.no_grad():
        scores = torch.zeros(1, num_classes, *size)
        for image in item["img_data"]:
            scores = scores + module({"img_data": image}, segSize=size) / len(item["img_data"])
        predictions = scores.max(dim=1)[1][0].numpy()
    accuracy, pixels = utils.accuracy(predictions, label)
    intersection, union = utils.intersectionAndUnion(predictions, label, num_classes)
    return {"predictions": predictions, "scores": scores, "accuracy": accuracy, "pixels": int(pixels),
            "intersection": intersection, "union": union}
