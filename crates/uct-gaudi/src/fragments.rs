//! Rendezvous fragments in Gaudi memory (`UCX_RNDV_FRAG_MEM_TYPES=gaudi`).
//!
//! UCX stages pipelined messages in fragments, by default in host memory. For fragments in Gaudi memory
//! it has no default size and no default count: they are 0, UCX makes a memory pool of nothing, and the
//! process ends with a fatal error or a null pointer in UCX. The defaults are constants of libucp, and
//! the user's values are parsed before plugins are loaded, so a plugin cannot set them. It can keep UCX
//! away from that path: without a copy domain for Gaudi memory UCX stages nothing in it.

use uct::{Ucx, log};

/// Variables that name the memory types of fragments; the second is the older name of the first.
const TYPES: [&str; 2] = ["UCX_RNDV_FRAG_MEM_TYPES", "UCX_RNDV_FRAG_MEM_TYPE"];
/// Variables that have to say something about Gaudi memory then.
const SIZES: [&str; 2] = ["UCX_RNDV_FRAG_SIZE", "UCX_RNDV_FRAG_ALLOC_COUNT"];

/// Whether the user wants fragments in Gaudi memory without a size or a count; the reason is logged if
/// `log_error`.
pub(crate) fn lack_size(ucx: &Ucx, log_error: bool) -> bool {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let missing = missing(variable);
    if let Some(missing) = missing
        && log_error
    {
        log!(
            ucx,
            Error,
            "no Gaudi: fragments in Gaudi memory are wanted (UCX_RNDV_FRAG_MEM_TYPES), but {missing} \
             gives none for gaudi, UCX has no default, and would end the process; set \
             UCX_RNDV_FRAG_SIZE=host:512K,gaudi:4M and UCX_RNDV_FRAG_ALLOC_COUNT=host:128,gaudi:16"
        );
    }
    missing.is_some()
}

/// The variable that should give a value for Gaudi memory, and does not.
fn missing(variable: impl Fn(&str) -> String) -> Option<&'static str> {
    let names_gaudi = |list: String| list.split(',').any(|item| item.eq_ignore_ascii_case("gaudi"));
    if !TYPES.iter().any(|name| names_gaudi(variable(name))) {
        return None;
    }
    let gives_gaudi = |list: String| {
        // As UCX: the last one counts.
        let mut values = list.rsplit(',').filter_map(|item| item.split_once(':'));
        let value = values.find(|(name, _)| name.eq_ignore_ascii_case("gaudi"));
        value.is_some_and(|(_, value)| value.starts_with(|first: char| first != '0'))
    };
    SIZES.into_iter().find(|name| !gives_gaudi(variable(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Option<&'static str> {
        missing(|name| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map_or_else(String::new, |(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn fragments_in_gaudi_memory_need_a_size_and_a_count() {
        let [types, older] = TYPES;
        let [size, count] = SIZES;
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[(types, "host,cuda")]), None);
        assert_eq!(with(&[(types, "host,Gaudi")]), Some(size));
        assert_eq!(with(&[(older, "gaudi")]), Some(size));
        let sized = (size, "host:512K,gaudi:4M");
        assert_eq!(with(&[(types, "gaudi"), sized]), Some(count));
        assert_eq!(with(&[(types, "gaudi"), sized, (count, "gaudi:0")]), Some(count));
        assert_eq!(with(&[(types, "gaudi"), sized, (count, "gaudi:1,gaudi:0")]), Some(count));
        assert_eq!(with(&[(types, "gaudi"), sized, (count, "cuda:9,GAUDI:16")]), None);
    }
}
