class _Preset:
    def __init__(self, rms_eps, pre_eps, post_mult, repeat, sinkhorn_eps, convention):
        self.__dict__.update(locals())


PRESETS = {
    "train": _Preset(1e-6, 1e-6, 2.0, 20, 1e-6, "deepseek"),
    "repo": _Preset(1e-6, 1e-6, 1.0, 10, 1e-6, "deepseek"),
    "paper": _Preset(1e-20, 0.0, 2.0, 20, 0.0, "log"),
    "deepseek_v4": _Preset(1e-6, 1e-6, 2.0, 20, 1e-6, "deepseek"),
    "deepseek_v41": _Preset(1e-20, 1e-6, 2.0, 20, 1e-6, "deepseek"),
    "glm5": _Preset(1e-5, 1e-6, 2.0, 20, 1e-6, "deepseek"),
}


def find_preset(preset):
    return PRESETS[preset] if isinstance(preset, str) else preset
