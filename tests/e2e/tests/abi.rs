//! The layouts in `uct::abi` against the stock binaries themselves.
//!
//! The packages with 1.21 and 1.22 carry debug information, so every structure that `uct` declares is compared
//! with it, field by field. NIXL's UCX is stripped; there, and on the others, the slots of the operation
//! tables are found out by the same probe that the plugin runs before it registers.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::{Layout, Ucx};
use object::{Object, ObjectSection};
use uct::abi::Variant;

/// Those with debug information.
const EXPLAINED: [Ucx; 2] = [Ucx::V1_21, Ucx::V1_22];

/// Size and field offsets of a C structure.
#[derive(Debug, Default, Clone, PartialEq)]
struct Shape {
    size: u64,
    fields: HashMap<String, u64>,
}

type Reader<'a> = gimli::EndianSlice<'a, gimli::LittleEndian>;

/// Every typedef of a structure or union in a library's debug information.
fn shapes(library: &Path) -> HashMap<String, Shape> {
    let bytes = std::fs::read(library).unwrap_or_else(|e| panic!("{}: {e}", library.display()));
    let file = object::File::parse(&*bytes).expect("an ELF file");
    let section = |id: gimli::SectionId| -> Result<Reader<'_>, gimli::Error> {
        let data = file.section_by_name(id.name()).and_then(|section| section.data().ok());
        Ok(gimli::EndianSlice::new(data.unwrap_or(&[]), gimli::LittleEndian))
    };
    let dwarf = gimli::Dwarf::load(section).expect("debug information");
    let mut found = HashMap::new();
    let mut units = dwarf.units();
    while let Some(header) = units.next().expect("a unit") {
        let unit = dwarf.unit(header).expect("a unit");
        collect(&dwarf, &unit, &mut found);
    }
    found
}

fn collect(
    dwarf: &gimli::Dwarf<Reader<'_>>,
    unit: &gimli::Unit<Reader<'_>>,
    found: &mut HashMap<String, Shape>,
) {
    let name_of = |entry: &gimli::DebuggingInformationEntry<'_, '_, Reader<'_>>| {
        let value = entry.attr_value(gimli::DW_AT_name).ok()??;
        Some(dwarf.attr_string(unit, value).ok()?.to_string_lossy().into_owned())
    };
    let mut entries = unit.entries();
    while let Ok(Some((_, entry))) = entries.next_dfs() {
        if entry.tag() != gimli::DW_TAG_typedef {
            continue;
        }
        let (Some(name), Ok(Some(gimli::AttributeValue::UnitRef(target)))) =
            (name_of(entry), entry.attr_value(gimli::DW_AT_type))
        else {
            continue;
        };
        let Ok(mut tree) = unit.entries_tree(Some(target)) else { continue };
        let Ok(root) = tree.root() else { continue };
        let size = match root.entry().attr_value(gimli::DW_AT_byte_size) {
            Ok(Some(size)) if root.entry().tag() == gimli::DW_TAG_structure_type => {
                size.udata_value().unwrap_or(0)
            }
            _ => continue,
        };
        let mut shape = Shape { size, ..Shape::default() };
        let mut children = root.children();
        while let Ok(Some(child)) = children.next() {
            let field = child.entry();
            let offset = field.attr_value(gimli::DW_AT_data_member_location).ok().flatten();
            if let (Some(name), Some(offset)) = (name_of(field), offset) {
                shape.fields.insert(name, offset.udata_value().unwrap_or(u64::MAX));
            }
        }
        found.insert(name, shape);
    }
}

/// Compares one Rust type with one C type. `ours => theirs` where the names differ. `head`: the C type is longer
/// in some versions. `mask`: it is shorter in some, and a mask says which fields count.
macro_rules! same_shape {
    (head $shapes:expr, $c:literal, $rust:ty, $fields:tt) => {{
        assert!($shapes[$c].size >= size_of::<$rust>() as u64, "size of {}", $c);
        same_shape!(fields $shapes, $c, $rust, $fields);
    }};
    (mask $shapes:expr, $c:expr, $rust:ty, $fields:tt) => {{
        assert!($shapes[$c].size <= size_of::<$rust>() as u64, "size of {}", $c);
        same_shape!(fields $shapes, $c, $rust, $fields);
    }};
    ($shapes:expr, $c:literal, $rust:ty, $fields:tt) => {{
        let shape = $shapes.get($c).unwrap_or_else(|| panic!("no {} in the debug information", $c));
        assert_eq!(shape.size, size_of::<$rust>() as u64, "size of {}", $c);
        same_shape!(fields $shapes, $c, $rust, $fields);
    }};
    (fields $shapes:expr, $c:expr, $rust:ty, { $($ours:ident $(=> $theirs:literal)?),* $(,)? }) => {{
        let shape = &$shapes[$c];
        $(
            let theirs = [$($theirs,)? stringify!($ours)][0];
            let offset = shape.fields.get(theirs)
                .unwrap_or_else(|| panic!("{} has no field {theirs}", $c));
            assert_eq!(*offset, core::mem::offset_of!($rust, $ours) as u64, "{}.{theirs}", $c);
        )*
    }};
}

fn library(ucx: Ucx, prefix: &str) -> PathBuf {
    let folder = &ucx.lib_dirs(&Layout::from_env())[0];
    let mut candidates: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}; run `cargo xtask setup`", folder.display()))
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with(prefix) && name.contains(".so")
        })
        .collect();
    candidates.sort();
    candidates.pop().unwrap_or_else(|| panic!("no {prefix} in {}", folder.display()))
}

/// What hooks are made of is libucm's.
#[test]
fn the_relocation_patch_equals_the_debug_information_of_libucm() {
    for ucx in EXPLAINED {
        let shapes = shapes(&library(ucx, "libucm."));
        same_shape!(shapes, "ucm_reloc_patch_t", uct::RelocPatch, {
            symbol, value, prev_value, list, blacklist,
        });
    }
}

#[test]
fn structures_equal_the_debug_information_of_the_stock_library() {
    EXPLAINED.into_iter().for_each(structures_equal_the_debug_information);
}

fn structures_equal_the_debug_information(ucx: Ucx) {
    use uct::abi::*;
    let shapes = shapes(&library(ucx, "libuct."));
    same_shape!(shapes, "uct_component_t", RawComponent, {
        name, query_md_resources, md_open, cm_open, rkey_unpack, rkey_ptr, rkey_release,
        rkey_compare, md_config, cm_config, tl_list, list, flags, md_vfs_init,
    });
    same_shape!(shapes, "uct_tl_t", RawTl, { name, query_devices, iface_open, config, list });
    same_shape!(shapes, "uct_md_resource_desc_t", MdResource, { md_name });
    same_shape!(shapes, "uct_tl_device_resource_t", TlResource, {
        name, device_type => "type", sys_device,
    });
    same_shape!(shapes, "uct_rkey_unpack_params_t", RkeyUnpackParams, { field_mask, sys_device });
    same_shape!(shapes, "uct_md_t", RawMd, { ops, component });
    same_shape!(head shapes, "uct_md_attr_v2_t", MdAttr, {
        field_mask, max_alloc, max_reg, flags, reg_mem_types, reg_nonblock_mem_types,
        cache_mem_types, gva_mem_types, detect_mem_types, alloc_mem_types, access_mem_types,
        dmabuf_mem_types, reg_cost, component_name, rkey_packed_size, local_cpus,
        exported_mkey_packed_size, global_id, reg_alignment,
    });
    same_shape!(mask shapes, "uct_md_mem_attr_t", MemAttr, {
        field_mask, mem_type, sys_dev, base_address, alloc_length, dmabuf_fd, dmabuf_offset,
    });
    same_shape!(mask shapes, "uct_md_mem_reg_params_t", MemRegParams, {
        field_mask, flags, dmabuf_fd, dmabuf_offset,
    });
    if ucx == Ucx::V1_22 {
        same_shape!(shapes, "uct_md_mem_attr_v2_t", MemAttr, {
            field_mask, mem_type, sys_dev, base_address, alloc_length, dmabuf_fd, dmabuf_offset,
            mem_flags,
        });
        same_shape!(shapes, "uct_md_mem_reg_params_t", MemRegParams, { mem_type });
    }
    same_shape!(shapes, "uct_md_mem_dereg_params_t", MemDeregParams, {
        field_mask, flags, memh, comp,
    });
    same_shape!(shapes, "uct_iface_attr_t", IfaceAttr, {
        device_addr_len, iface_addr_len, ep_addr_len, max_conn_priv, overhead, bandwidth,
        latency, priority, max_num_eps, dev_num_paths,
    });
    same_shape!(shapes, "uct_perf_attr_t", PerfAttr, {
        field_mask, operation, local_memory_type, remote_memory_type, local_sys_device,
        remote_sys_device, send_pre_overhead, send_post_overhead, recv_overhead, bandwidth,
        path_bandwidth, latency, max_inflight_eps, flags,
    });
    same_shape!(shapes, "uct_ep_params_t", EpParams, {
        field_mask, iface, user_data, dev_addr, iface_addr, sockaddr, dev_addr_length,
        iface_addr_length,
    });
    same_shape!(shapes, "uct_iface_is_reachable_params_t", ReachableParams, {
        field_mask, device_addr, iface_addr, info_string, info_string_length, scope,
        device_addr_length, iface_addr_length,
    });
    same_shape!(shapes, "uct_iov_t", Iov, { buffer, length, memh, stride, count });
    same_shape!(shapes, "uct_completion_t", RawCompletion, { func, count, status });
    same_shape!(shapes, "ucs_class_t", Class, { name, size, superclass, init, cleanup });
    same_shape!(shapes, "ucs_list_link_t", ListLink, { prev, next });
    same_shape!(shapes, "ucs_linear_func_t", LinearFunc, { constant => "c", slope => "m" });
    same_shape!(shapes, "uct_ppn_bandwidth_t", Bandwidth, { dedicated, shared });
    same_shape!(shapes, "ucs_config_global_list_entry_t", ConfigEntry, {
        name, prefix, table, size => "size", list, flags,
    });
    same_shape!(shapes, "ucs_config_parser_t", ConfigParser, {
        read, write, clone, release, help, doc, arg,
    });
    same_shape!(shapes, "ucs_config_field_t", RawConfigField, {
        name, dfl_value, doc, offset, parser,
    });
    same_shape!(shapes, "ucs_config_key_field_t", ConfigKeyField, { name, doc, offset });
    same_shape!(shapes, "ucs_config_key_value_param_t", ConfigKeyValue, { parser, keys });
    // Tables that we fill longer than this version reads.
    assert_eq!(shapes["uct_iface_ops_t"].size, 8 * IFACE_OP_SLOTS as u64);
    assert!(shapes["uct_iface_internal_ops_t"].size <= 8 * INTERNAL_OP_SLOTS as u64);
    assert!(shapes["uct_md_ops_t"].size <= 8 * MD_OP_SLOTS as u64);
    // Structures of which we only declare the head.
    assert_eq!(shapes["uct_iface_config_t"].size, IFACE_CONFIG_SIZE as u64);
    assert!(shapes["uct_iface_params_t"].size >= size_of::<IfaceParams>() as u64);
    let ucs = self::shapes(&library(ucx, "libucs."));
    assert!(size_of::<MemoryInfo>() as u64 >= ucs["ucs_memory_info_t"].size);
}

#[test]
fn operation_slots_have_their_names_where_the_stock_library_has_them() {
    EXPLAINED.into_iter().for_each(operation_slots_have_their_names);
}

fn operation_slots_have_their_names(ucx: Ucx) {
    use uct::abi::{iface_op, internal_op, md_op};
    let shapes = shapes(&library(ucx, "libuct."));
    let variant = if ucx == Ucx::V1_21 { V1_21 } else { V1_22 };
    macro_rules! slots {
        ($table:literal, $module:ident, { $($field:ident $slot:ident,)* }) => {$(
            let offset = shapes[$table].fields[stringify!($field)];
            assert_eq!(offset / 8, $module::$slot as u64, stringify!($field));
        )*};
        (internal { $($field:ident $slot:ident,)* }) => {$(
            let offset = shapes["uct_iface_internal_ops_t"].fields.get(stringify!($field));
            let slot = variant.internal(internal_op::$slot);
            assert_eq!(offset.map(|at| *at as usize / 8), slot, stringify!($field));
        )*};
    }
    slots!("uct_iface_ops_t", iface_op, {
        ep_put_short EP_PUT_SHORT, ep_put_zcopy EP_PUT_ZCOPY, ep_get_short EP_GET_SHORT,
        ep_get_zcopy EP_GET_ZCOPY, ep_tag_rndv_zcopy EP_TAG_RNDV_ZCOPY,
        ep_pending_add EP_PENDING_ADD, ep_pending_purge EP_PENDING_PURGE, ep_flush EP_FLUSH,
        ep_fence EP_FENCE, ep_check EP_CHECK, ep_create EP_CREATE, ep_destroy EP_DESTROY,
        iface_flush IFACE_FLUSH, iface_fence IFACE_FENCE,
        iface_progress_enable IFACE_PROGRESS_ENABLE,
        iface_progress_disable IFACE_PROGRESS_DISABLE, iface_progress IFACE_PROGRESS,
        iface_event_fd_get IFACE_EVENT_FD_GET, iface_event_arm IFACE_EVENT_ARM,
        iface_close IFACE_CLOSE, iface_query IFACE_QUERY,
        iface_get_device_address IFACE_GET_DEVICE_ADDRESS, iface_get_address IFACE_GET_ADDRESS,
        iface_is_reachable IFACE_IS_REACHABLE,
    });
    slots!(internal {
        iface_query_v2 IFACE_QUERY_V2, iface_estimate_perf IFACE_ESTIMATE_PERF,
        iface_vfs_refresh IFACE_VFS_REFRESH, ep_query EP_QUERY, ep_invalidate EP_INVALIDATE,
        iface_is_reachable_v2 IFACE_IS_REACHABLE_V2, ep_is_connected EP_IS_CONNECTED,
        ep_get_device_ep EP_GET_DEVICE_EP,
    });
    slots!("uct_md_ops_t", md_op, {
        close CLOSE, query QUERY, mem_alloc MEM_ALLOC, mem_free MEM_FREE, mem_advise MEM_ADVISE,
        mem_reg MEM_REG, mem_dereg MEM_DEREG, mem_query MEM_QUERY, mkey_pack MKEY_PACK,
        mem_attach MEM_ATTACH, detect_memory_type DETECT_MEMORY_TYPE,
        mem_elem_pack MEM_ELEM_PACK,
    });
}

const V1_21: Variant =
    Variant { iface_query_v2: false, iface_mem_element_pack: false, memory_flags: false };
/// vllm-gaudi builds one, and 1.20 has the same tables.
const SNAPSHOT: Variant =
    Variant { iface_query_v2: true, iface_mem_element_pack: true, memory_flags: false };
const V1_22: Variant =
    Variant { iface_query_v2: true, iface_mem_element_pack: false, memory_flags: true };

/// Each in a process of its own: libraries of one name would share a libucs.
#[test]
fn the_probe_agrees_with_all_stock_libraries() {
    let stock = |ucx| library(ucx, if ucx == Ucx::Nixl { "libuct-" } else { "libuct." });
    let [v1_21, v1_22, nixl] = Ucx::WITH_1_21.map(stock);
    // Refused for another reason.
    let v1_20 = Layout::from_env().old_ucx().join("libuct.so.0");
    for (path, variant) in [(v1_21, V1_21), (v1_22, V1_22), (nixl, V1_22), (v1_20, SNAPSHOT)] {
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "probes_a_library", "--nocapture", "--ignored"])
            .env("LD_LIBRARY_PATH", path.parent().expect("a folder"))
            .env("UCX_GAUDI_TEST_LIBUCT", &path)
            .output();
        let said = String::from_utf8(output.expect("runs").stdout).expect("text");
        let wanted = format!("{:?}", Ok::<_, String>(variant));
        assert!(said.contains(&wanted), "{}: {said}", path.display());
    }
}

#[test]
#[ignore = "run by the test above as a process of its own"]
fn probes_a_library() {
    let path = std::env::var_os("UCX_GAUDI_TEST_LIBUCT").expect("run by another test");
    println!("{:?}", uct::probe_library(Path::new(&path)));
}

/// What the probe says of a libuct whose tables are laid out as these definitions say (`abi/grown.c`). It
/// runs in this process: a probe that crashes ends the test.
fn probe_of(definitions: &str) -> Result<Variant, String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = folder.path().join("libuct-grown.so");
    let standard = "-DPUBLIC=50 -DBEFORE_LAST=0 -DINTERNAL=0 -DMD=0 -DCOMPONENT=0 -DOPEN=0 \
                    -DQUERY_V2=1 -DELEMENT=0 -DFLAGS=1";
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-o"])
        .arg(&library)
        .args(standard.split_whitespace())
        // The last definition of a name counts; a second one without a word of warning.
        .args(definitions.split_whitespace().flat_map(|definition| {
            let name = definition.split('=').next().unwrap_or(definition);
            [format!("-U{}", &name[2..]), definition.to_owned()]
        }))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/abi/grown.c"))
        .output()
        .expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    uct::probe_library(&library)
}

#[test]
fn the_probe_survives_tables_that_grew_or_shrank_and_says_where() {
    assert_eq!(probe_of(""), Ok(V1_22), "the stand-in as such");
    assert_eq!(probe_of("-DQUERY_V2=0 -DFLAGS=0"), Ok(V1_21));
    assert_eq!(probe_of("-DELEMENT=1 -DFLAGS=0"), Ok(SNAPSHOT));
    let outside = "calls a slot outside those that are known";
    for (definitions, says) in [
        // More public operations, so that the pointer to the internal ones has moved.
        ("-DPUBLIC=51", format!("uct_iface_query_v2 {outside}")),
        ("-DPUBLIC=52", format!("uct_iface_query_v2 {outside}")),
        ("-DPUBLIC=100", format!("uct_iface_query_v2 {outside}")),
        // One public operation fewer: the last, for which there is no wrapper.
        ("-DPUBLIC=49", format!("uct_iface_query_v2 {outside}")),
        // The same, and not at the end.
        ("-DPUBLIC=49 -DBEFORE_LAST=-1", "uct_iface_query calls slot 45, not 46".to_owned()),
        ("-DPUBLIC=51 -DBEFORE_LAST=1", "uct_iface_query calls slot 47, not 46".to_owned()),
        ("-DPUBLIC=54 -DBEFORE_LAST=4", format!("uct_iface_query {outside}")),
        ("-DPUBLIC=90 -DBEFORE_LAST=40", format!("uct_iface_query {outside}")),
        ("-DINTERNAL=1", "uct_iface_query_v2 calls slot 51, not 50".to_owned()),
        ("-DINTERNAL=1 -DQUERY_V2=0", "uct_iface_estimate_perf calls slot 51, not 50".to_owned()),
        ("-DINTERNAL=40", format!("uct_iface_query_v2 {outside}")),
        ("-DMD=1", "uct_md_close calls slot 1, not 0".to_owned()),
        ("-DMD=80", format!("uct_md_close {outside}")),
        ("-DOPEN=1", "uct_md_open calls slot 2, not 1".to_owned()),
        ("-DCOMPONENT=2", "uct_rkey_ptr calls slot 6, not 4".to_owned()),
        ("-DCOMPONENT=9", format!("uct_rkey_ptr {outside}")),
    ] {
        assert_eq!(probe_of(definitions), Err(says), "{definitions}");
    }
}
