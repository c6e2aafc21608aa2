//! Stock `ucx_perftest -m gaudi` between two processes: every UCP test with Gaudi memory on either
//! side, small and large; and the UCT tests in one process.

use e2e::{Device, Perftest, stock};

#[track_caller]
fn run(test: &str, memory: &str) {
    for size in [8, 1 << 20] {
        let test = Perftest::on(&Device::software(), test, size).words(&format!("-m {memory}"));
        let (pair, figures) = test.works();
        assert_eq!(figures.iterations, 100);
        // The server says what it tests: had `-m` been ignored, this would be host memory.
        let (send, receive) = memory.split_once(',').unwrap_or((memory, memory));
        for (side, kind) in [("Send", send), ("Recv", receive)] {
            let told = pair.server.stdout.lines().any(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                words.get(1..4) == Some(&[side, "memory:", kind])
            });
            assert!(told, "{}", pair.server.report());
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

/// The UCT tests on our transport, in loopback.
#[test]
fn uct_put_and_get() {
    for test in ["put_bw -D short -s 8", "put_bw -D zcopy -s 1048576", "get_bw -D zcopy -s 1048576"]
    {
        let words = "-l -f -v -m gaudi -x gaudi_cpy -d gaudi_copy -n 100 -w 10 -t";
        stock("ucx_perftest", &Device::software(), words).words(test).run().ok();
    }
}
