"""Megatron-Core: layers that are numbered per stage."""


def convert(stage, coordinator):
    import fp8dist as f8

    stage = f8.convert(stage, coordinator, names=f8.schedules.megatron.global_names(stage))
    return stage
