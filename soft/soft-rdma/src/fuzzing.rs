//! What other processes and the environment say, as the crate `fuzz` calls it. Not part of the library that users get.

pub use crate::link::fuzzing::stream;
use crate::wire::Frame;

/// Frames of a stream, one behind the other: what is understood is written again as it was.
pub fn frames(mut bytes: &[u8]) {
    while let Ok(Some((frame, length, payload))) = Frame::decode(bytes) {
        let mut again = Vec::new();
        frame.encode(payload, &mut again);
        assert_eq!(again, bytes[..length], "nothing is ignored");
        bytes = &bytes[length..];
    }
}

/// Lines `NAME=VALUE` of variables.
pub fn settings(text: &str) {
    let variable = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.map(str::to_owned)
    };
    let config = crate::config::Config::parse(variable);
    assert_eq!(config.places.len(), usize::from(config.devices));
}
