//! dma-bufs of Gaudi memory, taken from memory domains through stock libuct and mapped by somebody
//! who knows nothing of UCX.

mod importer;
mod memory;

use e2e::Ucx;
use importer::Importer;
use memory::Machine;

#[track_caller]
fn checked_by_an_importer(machine: &Machine, ucx: Ucx, words: &str) {
    let importer = Importer::start();
    let end = machine.check(ucx, words).arg("--importer").arg(importer.socket()).run();
    assert!(end.success(), "{}, UCX {}: {}", machine.name, ucx.name(), end.report());
    assert!(end.stdout.contains("the importer read and wrote"), "{}", end.report());
}

#[test]
fn descriptor_offset_and_content_of_any_range() {
    for ucx in Ucx::ALL {
        for machine in Machine::all() {
            checked_by_an_importer(&machine, ucx, "dmabuf");
        }
    }
}

#[test]
fn gaudi_gdr_offers_the_same() {
    checked_by_an_importer(&Machine::eight_cards(), Ucx::V1_22, "dmabuf --component gaudi_gdr");
}

/// The older driver call knows no offset: the whole mapping, and an offset of our own.
#[test]
fn both_driver_calls_give_the_right_bytes() {
    for choice in ["yes", "no", "try"] {
        let set = format!("dmabuf --set GAUDI_COPY_ENABLE_MAPPED_DMABUF={choice}");
        checked_by_an_importer(&Machine::eight_cards(), Ucx::Nixl, &set);
    }
}

/// `try`, the default, exports when first asked, `yes` at allocation.
#[test]
fn dmabuf_setting_decides_when_memory_is_exported() {
    for ucx in Ucx::ALL {
        for (setting, added) in [("try", 1), ("yes", 0)] {
            let machine = Machine::eight_cards();
            let tool = machine.check(ucx, "dmabuf").env("UCX_GAUDI_COPY_DMABUF", setting);
            let end = tool.run().ok();
            let said = format!("the first export added {added} descriptors");
            assert!(end.stdout.contains(&said), "{setting}: {}", end.report());
        }
    }
}

#[test]
fn dmabuf_no_offers_none() {
    for ucx in Ucx::ALL {
        let machine = Machine::eight_cards();
        let run = |what| machine.check(ucx, what).env("UCX_GAUDI_COPY_DMABUF", "no").run().ok();
        let attributes = run("attributes");
        for component in ["gaudi_copy", "gaudi_gdr"] {
            let line = format!("{component} does not offer dma-bufs");
            assert!(attributes.stdout.contains(&line), "{}", attributes.report());
        }
        let end = run("dmabuf");
        assert!(end.stdout.contains("no dma-bufs are offered"), "{}", end.report());
    }
}

/// A machine whose driver refuses every export.
fn without_exports() -> Machine {
    Machine::with("Gaudi2 without exports", "gaudi2", 1, |node| {
        node.with_faults(
            "hlthunk_device_mapped_memory_export_dmabuf_fd fail:EINVAL times=0\n\
             hlthunk_device_memory_export_dmabuf_fd fail:EINVAL times=0",
        )
    })
}

#[test]
fn dmabuf_yes_fails_loudly_where_the_driver_refuses() {
    for ucx in Ucx::ALL {
        let machine = without_exports();
        let end = machine.check(ucx, "where").env("UCX_GAUDI_COPY_DMABUF", "yes").run().refused();
        assert!(end.says(&["ERROR", "DMABUF=yes"]), "{}", end.report());
    }
}

#[test]
fn dmabuf_try_goes_on_without_and_says_why_at_info_level() {
    for ucx in Ucx::ALL {
        let machine = without_exports();
        machine.check(ucx, "where").run().ok();
        let end = machine.check(ucx, "dmabuf").env("UCX_LOG_LEVEL", "info").run();
        assert!(!end.crashed(), "{}", end.report());
        assert!(end.says(&["INFO", "no dma-buf", "exporting"]), "{}", end.report());
    }
}

/// The driver exports device memory only; whoever asks for more hears so.
#[test]
fn host_memory_as_dmabuf_is_refused_with_the_reason() {
    let machine = Machine::eight_cards();
    let end = machine.check(Ucx::V1_22, "dmabuf").env("UCX_LOG_LEVEL", "info").run().ok();
    assert!(end.says(&["the driver exports device memory only"]), "{}", end.report());
}
