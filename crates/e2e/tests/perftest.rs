//! Stock `ucx_perftest -m gaudi` between two processes: every UCP test with Gaudi memory on either
//! side, small and large; and the UCT tests in one process.

use e2e::{Device, Perftest, Ucx, Workbench};

const SIZES: [usize; 2] = [8, 1 << 20];

#[track_caller]
fn run(test: &str, memory: &str) {
    let bench = Workbench::from_env();
    let device = Device::software();
    for size in SIZES {
        let pair = Perftest::new(&bench, test, size)
            .iterations(100, 10)
            .plugin()
            .device(&device)
            .both(|tool| tool.words(&format!("-m {memory}")))
            .run()
            .unwrap_or_else(|error| panic!("{error:#}"));
        let figures = pair.figures().unwrap_or_else(|error| panic!("{error:#}"));
        assert_eq!(figures.iterations, 100);
        // The server says what it tests: had `-m` been ignored, this would be host memory.
        let (send, receive) = memory.split_once(',').unwrap_or((memory, memory));
        for (side, kind) in [("Send", send), ("Recv", receive)] {
            assert!(
                pair.server.stdout.lines().any(|line| {
                    let words: Vec<&str> = line.split_whitespace().collect();
                    words.get(1..4) == Some(&[side, "memory:", kind])
                }),
                "{}",
                pair.server.report()
            );
        }
    }
}

macro_rules! matrix {
    ($($name:ident: $test:literal),+ $(,)?) => {$(
        mod $name {
            #[test]
            fn gaudi_to_gaudi() {
                super::run($test, "gaudi");
            }
            #[test]
            fn gaudi_to_host() {
                super::run($test, "gaudi,host");
            }
            #[test]
            fn host_to_gaudi() {
                super::run($test, "host,gaudi");
            }
        }
    )+};
}

matrix! {
    tag_bw: "tag_bw",
    tag_lat: "tag_lat",
    put_bw: "ucp_put_bw",
    get: "ucp_get",
    am_bw: "ucp_am_bw",
    stream_bw: "stream_bw",
}

/// One UCT test on our transport, in loopback.
#[track_caller]
fn uct(arguments: &str) {
    Workbench::from_env()
        .tool(Ucx::V1_22, "ucx_perftest")
        .plugin()
        .device(&Device::software())
        .words("-l -f -v -m gaudi -x gaudi_cpy -d gaudi_copy -n 100 -w 10")
        .words(arguments)
        .run()
        .ok();
}

#[test]
fn uct_put_short() {
    uct("-t put_bw -D short -s 8");
}

#[test]
fn uct_put_zcopy() {
    uct("-t put_bw -D zcopy -s 1048576");
}

#[test]
fn uct_get_zcopy() {
    uct("-t get_bw -D zcopy -s 1048576");
}
