//! `ucx-gaudi explain`: which protocol UCP uses for an operation, and why.
//!
//! UCX decides only when endpoints exist and the memory is known, so the tool observes it: two processes of `ucp-check`
//! run the operation once with `UCX_PROTO_INFO=y`, and the tool reads their tables. For a process that is already
//! running: [`running`].

pub(crate) mod compare;
mod process;
mod running;

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use serde_json::json;
use ucp_protocols::{Choice, Protocols};

use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::{DIM, print_json, size};
use crate::ucp_check::UcpCheck;

/// Options of `explain`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    message: Option<Message>,
    /// Folder with libucp, or the prefix of a UCX; default: what the loader path finds
    #[arg(long, value_name = "DIR", conflicts_with_all = ["pid", "compare"])]
    ucx: Option<PathBuf>,
    /// A running process instead: what it moved, and what its UCX chooses with its settings. Several: also what differs
    #[arg(long, value_name = "PID", conflicts_with = "Message", required_unless_present_any = ["compare", "Message"])]
    pid: Vec<u32>,
    /// With --pid: the size of the message
    #[arg(long = "size", value_name = "SIZE", value_parser = bytes, default_value = "1M")]
    of: usize,
    /// With --pid: write the report to a file, to compare it with that of another node
    #[arg(long, value_name = "FILE", requires = "pid", conflicts_with = "Message")]
    save: Option<PathBuf>,
    /// Compare two files of --save
    #[arg(long, value_name = "FILE", num_args = 2, conflicts_with_all = ["pid", "Message"])]
    compare: Vec<PathBuf>,
}

/// What is asked about.
#[derive(Debug, Args)]
struct Message {
    /// What is done
    #[arg(value_enum)]
    operation: Operation,
    /// Where the data is
    #[arg(value_enum)]
    source: Memory,
    /// Where it goes to
    #[arg(value_enum)]
    destination: Memory,
    /// Bytes, such as 8, 64K or 4M
    #[arg(value_parser = bytes)]
    size: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Operation {
    /// ucp_tag_send and ucp_tag_recv
    Tag,
    /// ucp_am_send
    Am,
    /// ucp_stream_send and ucp_stream_recv
    Stream,
    /// ucp_put
    Put,
    /// ucp_get
    Get,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Memory {
    /// Host memory
    Host,
    /// Memory of a Gaudi
    Gaudi,
}

/// Largest message to try.
const LARGEST: usize = 1 << 30;

pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err(String::from("write bytes as 8, 64K or 4M")),
    };
    let number = digits.parse::<usize>().ok().and_then(|number| number.checked_mul(1 << shift));
    let number = number.filter(|number| *number <= LARGEST);
    number.ok_or_else(|| String::from("write bytes as 8, 64K or 4M, up to 1G"))
}

impl Operation {
    fn word(self) -> &'static str {
        match self {
            Operation::Tag => "tag",
            Operation::Am => "am",
            Operation::Stream => "stream",
            Operation::Put => "put",
            Operation::Get => "get",
        }
    }

    /// The operation in UCX's words, without devices.
    fn title(self, source: Memory, destination: Memory) -> String {
        let (from, to) = (source.near(), destination.far());
        match self {
            Operation::Tag => format!("tagged message by ucp_tag_send* from {from}"),
            Operation::Am => format!("active message by ucp_am_send* from {from}"),
            Operation::Stream => format!("stream message by ucp_stream_send* from {from}"),
            Operation::Put => format!("remote memory write by ucp_put* from {from} to {to}"),
            Operation::Get => {
                let (into, from) = (destination.near(), source.far());
                format!("remote memory read by ucp_get* into {into} from {from}")
            }
        }
    }
}

impl Memory {
    fn word(self) -> &'static str {
        match self {
            Memory::Host => "host",
            Memory::Gaudi => "gaudi",
        }
    }

    /// UCX's name for memory of the process itself.
    fn near(self) -> &'static str {
        match self {
            Memory::Host => "host memory",
            Memory::Gaudi => "gaudi",
        }
    }

    /// UCX's name for memory of the peer.
    fn far(self) -> &'static str {
        self.word()
    }
}

/// One step of the answer.
struct Step {
    who: &'static str,
    choice: Choice,
}

/// Asks UCX and explains.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let Some(message) = &options.message else {
        return match &options.compare[..] {
            [] => running::explain(context, &options.pid, options.of, options.save.as_deref()),
            files => compare::compare(context, files),
        };
    };
    let protocols = ask(context, message, options.ucx.as_deref())?;
    let Message { operation, source, destination, size: len } = *message;
    let title = operation.title(source, destination);
    let steps = steps(&protocols, &title, source, destination, len);
    if steps.is_empty() {
        let known: Vec<&str> = protocols.operations().map(|(_, operation)| operation).collect();
        return Err(Failure::unable(
            format!("UCX told nothing about \"{title}\" between two processes"),
            format!("it told about: {}", known.join("; ")),
        ));
    }
    if context.json {
        let steps: Vec<_> = steps
            .iter()
            .map(|Step { who, choice }| {
                json!({
                    "who": who, "protocol": choice.protocol, "transports": choice.transports,
                    "from": choice.sizes.start(), "to": limit(choice), "words": words(choice),
                })
            })
            .collect();
        print_json(
            &json!({"operation": title, "size": len, "steps": steps, "advice": advice(&protocols, &title, len)}),
        );
        return Ok(Exit::Fine);
    }
    let word = operation.word();
    println!(
        "{word} of {} from {} to {} memory, between two processes of this host:",
        size(len as u64),
        source.word(),
        destination.word()
    );
    for Step { who, choice } in &steps {
        let from = choice.sizes.start();
        let to = limit(choice).map_or(String::from("any size"), |to| size(to as u64));
        let over = if choice.transports.is_empty() { "" } else { " over " };
        println!("\n  {who}: {}{over}{}", choice.protocol, choice.transports);
        anstream::println!("  {DIM}from {} to {to}{DIM:#}", size(*from as u64));
        for line in words(choice) {
            println!("  - {line}");
        }
    }
    for line in advice(&protocols, &title, len) {
        println!("\n  → {line}");
    }
    Ok(Exit::Fine)
}

/// What the sender does and, if the receiver decides the rest, what the receiver does.
fn steps(
    protocols: &Protocols,
    title: &str,
    source: Memory,
    destination: Memory,
    len: usize,
) -> Vec<Step> {
    // Without transports within a node, UCX treats the other process as one on another node.
    let scopes = ["intra-node", "inter-node"];
    let scope = scopes.into_iter().find(|scope| protocols.choice(scope, title, len).is_some());
    let Some((scope, first)) = scope.and_then(|it| Some((it, protocols.choice(it, title, len)?)))
    else {
        return Vec::new();
    };
    let who = if title.starts_with("remote memory") { "initiator" } else { "sender" };
    let mut steps = vec![Step { who, choice: first.clone() }];
    if first.depends {
        let fetch =
            format!("rendezvous data fetch into {} from {}", destination.near(), source.far());
        let send = format!("rendezvous data send from {} to {}", source.near(), destination.far());
        let receiver = protocols.choice(scope, &fetch, len);
        steps.extend(receiver.map(|choice| Step { who: "receiver", choice: choice.clone() }));
        if receiver.is_some_and(|choice| choice.depends) {
            let sender = protocols.choice(scope, &send, len);
            steps.extend(sender.map(|choice| Step { who: "sender then", choice: choice.clone() }));
        }
    }
    steps
}

/// UCX's words, and their meaning.
const GLOSSARY: &[(&str, &str)] = &[
    ("eager", "the data is sent at once, with the message"),
    ("rendezvous", "the sender announces the message; the data moves when the receiver is ready"),
    ("short", "the CPU writes the data into the packet"),
    ("copy-in", "the data is copied into a send buffer first"),
    ("copy-out", "and out of a receive buffer at the other side"),
    ("zero-copy", "the data moves without a copy in between"),
    ("read from remote", "the receiver reads it from the sender's memory"),
    ("write to remote", "the sender writes it into the receiver's memory"),
    ("frag", "in pieces, through buffers of the memory named"),
    ("pipeline", "in pieces, several of them under way at once"),
    ("mapped remote memory", "the receiver maps the sender's memory and copies from it"),
    (
        "software emulation",
        "the peer's CPU takes part: slow, and only while the peer makes progress",
    ),
    (
        "gaudi_ipc",
        "gaudi_ipc: the card copies from card to card, or both processes copy through shared host memory",
    ),
    ("gaudi_cpy", "gaudi_cpy: the card's DMA engine copies between host memory and card"),
    ("gaudi_gdr", "gaudi_gdr: the card's DMA engine copies between host memory and card"),
    ("sysv", "sysv: shared host memory"),
    ("posix", "posix: shared host memory"),
    ("cma", "cma: the kernel copies between the processes' host memory"),
    ("tcp", "tcp: the host's network stack"),
    ("rc_", "rc: an HCA moves the data"),
    ("ud_", "ud: an HCA moves the data, in packets that the CPU handles"),
    ("self/", "self: within the process"),
];

/// The largest message of a choice; `None`: any size.
fn limit(choice: &Choice) -> Option<usize> {
    Some(*choice.sizes.end()).filter(|end| *end != usize::MAX)
}

/// What the choice means.
fn words(choice: &Choice) -> Vec<&'static str> {
    let text = format!("{} {}", choice.protocol, choice.transports);
    GLOSSARY.iter().filter(|(word, _)| text.contains(word)).map(|(_, meaning)| *meaning).collect()
}

/// What could be better.
fn advice(protocols: &Protocols, title: &str, len: usize) -> Vec<&'static str> {
    let Some(choice) = protocols.choice("intra-node", title, len) else { return Vec::new() };
    let mut advice = Vec::new();
    if choice.protocol.contains("software emulation") {
        advice.push(
            "`ucx-gaudi run --tuned` has the emulation use larger segments; UCX_RMA_PPLN_ENABLE=y avoids it, but see \
             share/doc/ucx-gaudi/docs/upstream/ucx-rma-pipeline.md first",
        );
    }
    // UCX never uses it for streams.
    let may_use_ipc = title.contains("gaudi") && !title.starts_with("stream");
    if may_use_ipc && !protocols.name_transport("gaudi_ipc") {
        advice.push(
            "gaudi_ipc is not used at all: UCX_TLS leaves it out, or it does not reach the peer (share/doc/ucx-gaudi/docs/ipc.md)",
        );
    }
    advice
}

/// Runs two processes with the operation, and reads their logs.
fn ask(context: &Context, message: &Message, ucx: Option<&Path>) -> Result<Protocols, Failure> {
    let checker = UcpCheck::new(context, "explain")?;
    let (operation, memories) = (
        message.operation.word(),
        format!("{}:{}", message.source.word(), message.destination.word()),
    );
    let mut command = checker.pair(operation, &memories, ucx);
    command.args(["--sizes", &message.size.to_string()]);
    observe(&checker, command, &format!("{operation} {memories}"), ucx)
}

/// Which protocols the UCX of two processes chose.
fn observe(
    checker: &UcpCheck,
    mut command: Command,
    what: &str,
    ucx: Option<&Path>,
) -> Result<Protocols, Failure> {
    command.env("UCX_PROTO_INFO", "y").env("UCX_LOG_FILE", checker.folder().join("%p"));
    let Some(mut ended) = checker.run(command)? else {
        return Err(Failure { exit: Exit::Interrupted, ..Failure::unable("ended by Ctrl-C", "") });
    };
    let logs = std::fs::read_dir(checker.folder()).into_iter().flatten().flatten();
    let texts = logs.filter_map(|log| std::fs::read(log.path()).ok());
    let texts: Vec<String> =
        texts.map(|text| String::from_utf8_lossy(&text).into_owned()).collect();
    let protocols = Protocols::merged(texts.iter().map(|text| Protocols::parse(text)));
    if ended.status.success() && !protocols.is_empty() {
        return Ok(protocols);
    }
    ended.said.extend(texts);
    Err(checker.explain_failure(what, &ended, ucx))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
[1.0] [vm:1:0]   | ucp_context_0 intra-node cfg#2 |
[1.0] [vm:1:0]   | tagged message by ucp_tag_send* from gaudi/GAUDI_1 |
[1.0] [vm:1:0]   |     1..8248 | eager copy-in copy-out | sysv/memory |
[1.0] [vm:1:0]   |   8249..inf | (?) rendezvous zero-copy read from remote | gaudi_ipc/gaudi_ipc |
[1.0] [vm:2:0]   | ucp_context_0 intra-node cfg#2 |
[1.0] [vm:2:0]   | rendezvous data fetch into gaudi/GAUDI_0 from gaudi |
[1.0] [vm:2:0]   |   1..inf | zero-copy read from remote | gaudi_ipc/gaudi_ipc |
";

    #[test]
    fn the_receiver_is_asked_where_it_decides() {
        let protocols = Protocols::parse(LOG);
        let title = Operation::Tag.title(Memory::Gaudi, Memory::Gaudi);
        let who = |len| {
            let steps = steps(&protocols, &title, Memory::Gaudi, Memory::Gaudi, len);
            steps.iter().map(|step| step.who).collect::<Vec<_>>()
        };
        assert_eq!(who(100), ["sender"]);
        assert_eq!(who(1 << 20), ["sender", "receiver"]);
        let large = steps(&protocols, &title, Memory::Gaudi, Memory::Gaudi, 1 << 20);
        let meaning = words(&large[1].choice);
        assert!(meaning.iter().any(|words| words.starts_with("gaudi_ipc:")), "{meaning:?}");
        assert!(advice(&protocols, &title, 100).is_empty());
        let small = steps(&protocols, &title, Memory::Gaudi, Memory::Gaudi, 100);
        assert_eq!((limit(&small[0].choice), limit(&large[1].choice)), (Some(8248), None));
    }

    #[test]
    fn sizes_are_read_or_refused() {
        assert_eq!((bytes("8"), bytes("64K"), bytes("4MiB")), (Ok(8), Ok(65536), Ok(4 << 20)));
        for wrong in ["", "K", "8X", "-1", "2G", "99999999999999999999"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
