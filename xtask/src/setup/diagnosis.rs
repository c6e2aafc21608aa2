//! Explains a failure of pip or Python: the cause, the remedy, and the last lines of the original.

/// Texts that indicate a cause, and the message for it. The first match wins, so causes come before their consequences:
/// without a network pip also ends with "no matching distribution".
const CAUSES: &[(&[&str], &str)] = &[
    (
        &["No module named pip", "No module named 'pip'"],
        "Python has no pip; install it (Debian, Ubuntu: apt install python3-pip; elsewhere: \
         python3 -m ensurepip)",
    ),
    (
        &["DO NOT MATCH THE HASHES"],
        "the downloaded file is not the one we pinned (hash mismatch): a proxy or a mirror altered \
         it, or the download broke; try again, and if it stays, check the index that \
         `python3 -m pip config list` shows",
    ),
    (
        &["No space left on device", "Disk quota exceeded", "Errno 28"],
        "the disk is full; the packages need about 350 MB under the target directory while they \
         are unpacked (180 MB after); free some space or move the target directory \
         (CARGO_TARGET_DIR)",
    ),
    (
        &["CERTIFICATE_VERIFY_FAILED", "SSLError", "SSLCertVerificationError"],
        "the package index presents a certificate that Python does not trust; give pip your \
         certificates (variable PIP_CERT, or `python3 -m pip config set global.cert FILE`)",
    ),
    (
        &["407 Proxy Authentication", "ProxyError", "Cannot connect to proxy"],
        "the proxy refused; check the variables https_proxy and PIP_PROXY",
    ),
    (
        &[
            "NewConnectionError",
            "NameResolutionError",
            "Temporary failure in name resolution",
            "Name or service not known",
            "Network is unreachable",
            "Connection refused",
            "Connection reset",
            "ConnectTimeoutError",
            "Read timed out",
            "Max retries exceeded",
        ],
        "the package index cannot be reached; check the network and proxy, or point pip to a \
         mirror you can reach (variables PIP_INDEX_URL or PIP_FIND_LINKS), then run \
         `cargo xtask setup` again. Once fetched, no network is needed any more",
    ),
    (
        &["No matching distribution", "Could not find a version"],
        "the package index that pip is configured for does not offer it, or does not answer; check \
         the network, `python3 -m pip config list` and the variables PIP_INDEX_URL, PIP_NO_INDEX and \
         PIP_FIND_LINKS",
    ),
    (
        &["no such option"],
        "pip is too old for the options used; upgrade it (python3 -m pip install --upgrade pip)",
    ),
    (
        &["Permission denied", "Errno 13"],
        "a file or folder cannot be written; check who owns the target directory",
    ),
];

/// Cause, remedy and the last lines of `stderr`.
pub(super) fn explain(stderr: &str) -> String {
    let remedy = CAUSES
        .iter()
        .find(|(signs, _)| signs.iter().any(|sign| stderr.contains(sign)))
        .map_or("pip failed", |(_, remedy)| remedy);
    let lines: Vec<&str> = stderr.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail = lines[lines.len().saturating_sub(6)..].join("\n  | ");
    if tail.is_empty() { remedy.to_owned() } else { format!("{remedy}\n  | {tail}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_network_is_not_mistaken_for_a_missing_package() {
        let said = explain(
            "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\n\
             ERROR: Could not find a version that satisfies the requirement x\n\
             ERROR: No matching distribution found for x\n",
        );
        assert!(said.starts_with("the package index cannot be reached"), "{said}");
    }

    #[test]
    fn each_cause_has_its_own_remedy() {
        for (stderr, expected) in [
            ("/usr/bin/python3: No module named pip", "ensurepip"),
            ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "hash mismatch"),
            ("OSError: [Errno 28] No space left on device", "disk is full"),
            ("ssl.SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED", "PIP_CERT"),
            ("ERROR: No matching distribution found for x", "does not offer it"),
            ("no such option: --require-hashes", "too old"),
        ] {
            let said = explain(stderr);
            assert!(said.contains(expected), "{stderr} → {said}");
            assert!(said.contains(stderr), "the original is kept: {said}");
        }
    }

    #[test]
    fn unknown_failure_shows_the_original() {
        assert_eq!(explain("boom"), "pip failed\n  | boom");
        assert_eq!(explain(""), "pip failed");
    }
}
