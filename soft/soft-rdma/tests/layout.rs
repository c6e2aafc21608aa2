//! The C structures have the layout that a C compiler gives them.

use std::fmt::Write;
use std::mem::offset_of;
use std::process::Command;

use soft_rdma::abi::{LAYOUTS, verbs_context_front};

/// A folder with `infiniband/verbs.h`: `VERBS_INCLUDE`, or where distributions put it.
fn include_folder() -> Option<String> {
    let named = std::env::var("VERBS_INCLUDE").ok();
    let folders = named.into_iter().chain(["/usr/include".to_owned()]);
    folders.into_iter().find(|f| std::path::Path::new(f).join("infiniband/verbs.h").exists())
}

#[test]
fn layouts_agree_with_the_installed_verbs_header() {
    let Some(include) = include_folder() else {
        eprintln!("skipped: no infiniband/verbs.h (install libibverbs-dev or set VERBS_INCLUDE)");
        return;
    };
    let mut probe = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n",
    );
    let mut expected = String::new();
    for (name, size, fields) in LAYOUTS {
        let _ = writeln!(probe, "printf(\"{name} %zu\\n\", sizeof(struct {name}));");
        let _ = writeln!(expected, "{name} {size}");
        for (field, at) in *fields {
            let _ = writeln!(
                probe,
                "printf(\"{name}.{field} %zu\\n\", offsetof(struct {name}, {field}));"
            );
            let _ = writeln!(expected, "{name}.{field} {at}");
        }
    }
    // What lies in front of an extended context grows there, and ends with its size.
    probe.push_str(
        "printf(\"front %d %zu\\n\", (int)(offsetof(struct verbs_context, context) - \
         offsetof(struct verbs_context, query_port)), offsetof(struct verbs_context, context) - \
         offsetof(struct verbs_context, sz));\n",
    );
    let front = size_of::<verbs_context_front>();
    let _ = writeln!(expected, "front {front} {}", front - offset_of!(verbs_context_front, sz));
    probe.push_str("return 0; }\n");

    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("layout");
    std::fs::create_dir_all(&folder).expect("a scratch folder");
    let (source, program) = (folder.join("probe.c"), folder.join("probe"));
    std::fs::write(&source, probe).expect("the probe is written");
    let built =
        Command::new("cc").args(["-I", &include]).arg("-o").arg(&program).arg(&source).output();
    let built = match built {
        Ok(built) => built,
        Err(error) => {
            eprintln!("skipped: no C compiler ({error})");
            return;
        }
    };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let output = Command::new(&program).output().expect("the probe runs");
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}
