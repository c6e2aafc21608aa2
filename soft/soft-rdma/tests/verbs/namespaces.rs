//! Two hosts as near to real ones as one machine can have them: two network namespaces with a virtual
//! cable between them, and a folder for each.

use std::process::Command;

use crate::processes::{exchange, lose};

/// Makes the namespaces without privileges (inside a user namespace), then runs its arguments in the
/// first. Ends with 77 where that is not possible.
const SCRIPT: &str = r#"
cannot() { echo "$1"; exit 77; }
ip link set lo up || cannot "no ip command"
unshare -n sleep 600 &
other=$!
trap 'kill $other' EXIT
for try in $(seq 200); do
    [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
    sleep 0.05
done
ip link add sr0 type veth peer name sr1 netns $other || cannot "no veth devices"
ip addr add 10.77.0.1/24 dev sr0 && ip link set sr0 up || cannot "no addresses"
inside="nsenter -t $other -n"
$inside ip addr add 10.77.0.2/24 dev sr1 && $inside ip link set sr1 up || cannot "no nsenter"
SOFT_RDMA_TEST_ENTER="$inside" "$@"
"#;

/// Runs a test again, in the first of two namespaces. True in the process that did so, or could not.
fn in_two_namespaces(test: &str) -> bool {
    if std::env::var_os("SOFT_RDMA_TEST_ENTER").is_some() || crate::processes::is_peer() {
        return false;
    }
    let name = format!("soft-rdma-{}-{}", std::process::id(), test.len());
    let folder = std::env::temp_dir().join(name);
    for host in ["1", "2"] {
        std::fs::create_dir_all(folder.join(host)).expect("a temporary folder");
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(folder.join(host), private).expect("ours");
    }
    let output = Command::new("unshare")
        .args(["-Urn", "sh", "-c", SCRIPT, "sh"])
        .arg(std::env::current_exe().expect("our own program"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env("SOFT_RDMA_NODES", "1=10.77.0.1:20000,2=10.77.0.2:20000")
        .env("SOFT_RDMA_DIR", folder.join("1"))
        .env("SOFT_RDMA_TEST_PEER_DIR", folder.join("2"))
        .output();
    let _ = std::fs::remove_dir_all(&folder);
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            eprintln!("skipped: cannot run unshare: {error}");
            return true;
        }
    };
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.code() == Some(77) || text.starts_with("unshare:") {
        eprintln!("skipped: no network namespaces here: {text}");
    } else {
        assert!(output.status.success(), "{text}");
        assert!(text.contains("1 passed"), "{text}");
    }
    true
}

#[test]
fn bytes_go_between_network_namespaces() {
    let test = "namespaces::bytes_go_between_network_namespaces";
    if !in_two_namespaces(test) {
        exchange(test, 2);
    }
}

#[test]
fn a_process_killed_in_another_namespace_ends_in_retry_exceeded() {
    let test = "namespaces::a_process_killed_in_another_namespace_ends_in_retry_exceeded";
    if !in_two_namespaces(test) {
        lose(test, 2);
    }
}
