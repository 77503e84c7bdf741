from extractor.config import NcclSection
from extractor.supervisor.environment import worker_environment


def origins(shell, nccl, device="cuda"):
    environment, variables = worker_environment(shell, nccl, device=device, package_root="/pkg")
    return environment, {variable.name: (variable.value, variable.origin) for variable in variables}


def test_preset_is_set_and_named():
    environment, listed = origins({}, NcclSection(preset="pcie-blackwell"))
    assert environment["NCCL_PROTO"] == "LL"
    assert listed["NCCL_P2P_LEVEL"] == ("SYS", "preset")


def test_run_toml_wins_over_preset_and_shell():
    nccl = NcclSection(preset="pcie-blackwell", env={"NCCL_PROTO": "Simple"})
    environment, listed = origins({"NCCL_PROTO": "LL128"}, nccl)
    assert environment["NCCL_PROTO"] == "Simple"
    assert listed["NCCL_PROTO"] == ("Simple", "run.toml")


def test_inherited_variables_are_kept_and_listed():
    environment, listed = origins({"NCCL_P2P_DISABLE": "1", "HOME": "/root"}, NcclSection())
    assert environment["NCCL_P2P_DISABLE"] == "1"
    assert listed == {"NCCL_P2P_DISABLE": ("1", "shell")}
    assert environment["HOME"] == "/root"


def test_worker_imports_this_package_and_asks_no_hub():
    environment, _ = origins({"PYTHONPATH": "/kit"}, NcclSection())
    assert environment["PYTHONPATH"] == "/kit:/pkg"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_cpu_threads_do_not_spin_unless_the_shell_says_so():
    assert origins({}, NcclSection(), "cpu")[0]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert origins({"OMP_WAIT_POLICY": "ACTIVE"}, NcclSection(), "cpu")[0]["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "OMP_WAIT_POLICY" not in origins({}, NcclSection(), "cuda")[0]


def test_gpus_of_the_run_are_those_that_nvidia_smi_counts():
    shell = {"CUDA_VISIBLE_DEVICES": "0,1"}
    environment, variables = worker_environment(
        shell, NcclSection(), device="cuda", package_root="/pkg", gpus=(4, 5)
    )
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["CUDA_DEVICE_ORDER"]) == ("4,5", "PCI_BUS_ID")
    assert {variable.name: variable.origin for variable in variables} == {
        "CUDA_DEVICE_ORDER": "run.toml",
        "CUDA_VISIBLE_DEVICES": "run.toml",
    }
    assert origins(shell, NcclSection())[0]["CUDA_VISIBLE_DEVICES"] == "0,1"
