# SPDX-License-Identifier: Apache-2.0
"""The two entry points. Neither ever raises: what goes wrong is said in one line, and vLLM stays as it was."""

from __future__ import annotations

from amx_mla_backend.log import logger

_STAYS = "amx-mla-backend stands back, vLLM stays as it is: %s"


def platform_plugin() -> str | None:
    """Entry point of ``vllm.platform_plugins``: class path of our platform, or None to leave vLLM's choice alone."""
    try:
        from amx_mla_backend import compat, envs, platform

        path = platform.subclass_path()
        if path is None:  # not a CPU host: nothing of ours, and nothing to say
            return None
        if envs.MODE.get() == "off":
            logger.info_once(_STAYS, f"switched off by {envs.MODE.name}")
            return None
        if reason := compat.unsupported_reason():
            logger.warning_once(_STAYS, reason)
            return None
        if rival := platform.other_plugin():
            logger.warning_once(_STAYS, f"the platform plugin {rival!r} is active, and vLLM takes only one")
            return None
        return path
    except Exception as error:
        logger.warning_once(_STAYS, f"{type(error).__name__}: {error}")
        return None


def general_plugin() -> None:
    """Entry point of ``vllm.general_plugins``: register backend and attention layer, if the platform is ours."""
    try:
        _register()
    except Exception as error:
        logger.warning_once(_STAYS, f"{type(error).__name__}: {error}")


def _register() -> None:
    import vllm.envs
    from vllm.platforms import current_platform

    from amx_mla_backend import envs
    from amx_mla_backend.platform import BACKEND_PATH, LatentAttentionPlatform

    envs.merge(vllm.envs.environment_variables)
    if not isinstance(current_platform, LatentAttentionPlatform):
        if vllm.envs.VLLM_TARGET_DEVICE == "cpu":
            logger.info_once(_STAYS, "VLLM_TARGET_DEVICE=cpu makes vLLM skip platform plugins")
        return

    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from amx_mla_backend import attention

    register_backend(AttentionBackendEnum.AMX_MLA, BACKEND_PATH)
    attention.register()
