//! The scenarios that play the cells of the matrix.

use super::{Kind, Outcome, Phase, Way};

/// What is done to play a fault.
#[derive(Debug, Clone, Copy)]
pub enum Play {
    /// Rules of the software Gaudi (`docs/software-gaudi.md`), set from the start. One run for each number, which replaces `{}`.
    Rules(&'static str, &'static [u32]),
    /// Rules that are set while bytes travel. One run for each process whose card copies, with and without UCX's error handling.
    Live(&'static str),
    /// One process gets ever lower limits on its descriptors, until a limit is too low.
    FewDescriptors,
    /// Variables for the program, settings of the software devices among them.
    Variables(&'static [(&'static str, &'static str)]),
    /// One process is stopped for this many seconds while bytes travel.
    Stopped(u64),
    /// `ucp-check` kills one of its processes in a transfer, and checks the other.
    Killed,
    /// `ucp-check` stops one of its processes in a transfer; the other closes the endpoint by force.
    GivenUp,
    /// Two processes connect and disconnect; one is killed this many milliseconds after they began.
    KilledClosing(&'static [u64]),
    /// An existing test plays it: its file, and its name.
    Test(&'static str, &'static str),
}

/// One way to play one or several cells.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// What goes wrong.
    pub kind: Kind,
    /// When.
    pub phase: Phase,
    /// The ways on which to play it.
    pub ways: &'static [Way],
    /// How.
    pub play: Play,
    /// The outcomes that are allowed.
    pub expected: &'static [Outcome],
    /// Words, one of which the log must contain if the outcome is an error or the process ends.
    pub says: &'static str,
    /// Part of the small selection that every run of the tests plays.
    pub quick: bool,
}

impl Scenario {
    /// Whether it plays this cell.
    pub fn is(&self, kind: Kind, phase: Phase, way: Way) -> bool {
        self.kind == kind && self.phase == phase && self.ways.contains(&way)
    }
}

use Kind::*;
use Outcome::*;
use Phase::*;
use Way::{Hca, Loopback, Staged};

/// Every way.
const ALL: &[Way] = &Way::ALL;
/// The ways on which the card copies.
const CARD: &[Way] = &[Staged, Way::Import, Way::Relay, Loopback];
/// Ways on which UCX stages: it ignores the status of copies, so the plugin ends the process.
const STAGING: &[Way] = &[Staged, Loopback];
/// Ways on which memory is freed before the card is closed, and ways on which memory was exported, so that the driver frees it.
const FREED: &[Way] = &[Staged, Way::Relay, Loopback];
const EXPORTED: &[Way] = &[Way::Import, Hca];
/// Ways on which UCX looks at the status of copies.
const IPC: &[Way] = &[Way::Import, Way::Relay];

const fn cell(
    kind: Kind,
    phase: Phase,
    ways: &'static [Way],
    play: Play,
    expected: &'static [Outcome],
    says: &'static str,
) -> Scenario {
    Scenario { kind, phase, ways, play, expected, says, quick: false }
}

/// The same, in every run of the tests.
const fn quick(scenario: Scenario) -> Scenario {
    Scenario { quick: true, ..scenario }
}

const fn test(
    kind: Kind,
    phase: Phase,
    ways: &'static [Way],
    (file, name): (&'static str, &'static str),
    expected: &'static [Outcome],
) -> Scenario {
    cell(kind, phase, ways, Play::Test(file, name), expected, "")
}

const ONCE: &[u32] = &[0];
/// Calls before the fault: some copies prepare the buffers, some belong to the message, some compare it.
const POINTS: &[u32] = &[0, 2, 5, 9, 14];

macro_rules! file {
    (e2e $name:literal) => {
        concat!("tests/e2e/tests/", $name, ".rs")
    };
    (gaudi $name:literal) => {
        concat!("plugin/gaudi/tests/", $name, ".rs")
    };
}

/// Every scenario, in the order of the page.
#[rustfmt::skip]
pub const SCENARIOS: &[Scenario] = &[
    quick(cell(AllocationFailure, Alloc, ALL, Play::Rules("hlthunk_device_memory_alloc fail:ENOMEM times=0", ONCE), &[Error], "OUT_OF_MEMORY")),
    cell(AllocationFailure, Map, ALL, Play::Rules("hlthunk_device_memory_map fail:ENOMEM times=0", ONCE), &[Error], "OUT_OF_MEMORY"),
    quick(cell(ExportFailure, Export, &[Way::Import, Hca], Play::Rules("hlthunk_device_mapped_memory_export_dmabuf_fd fail:EINVAL times=0\nhlthunk_device_memory_export_dmabuf_fd fail:EINVAL times=0", ONCE), &[FellBack], "")),
    test(ImportRefused, Phase::Import, &[Way::Import], (file!(e2e "ipc"), "import_in_one_process_only_is_relayed"), &[FellBack]),
    test(ImportRefused, Phase::Import, &[Hca], (file!(e2e "ib_failures"), "a_dma_buf_that_the_hca_refuses_is_staged_with_one_warning"), &[FellBack]),
    cell(DescriptorLimit, Open, ALL, Play::FewDescriptors, &[Delivered, Error], "Too many open files|descriptors|number of files"),
    test(DescriptorLimit, Export, &[Way::Import], (file!(gaudi "share_limits"), "an_exporter_short_of_descriptors_grants_nothing_that_it_does_not_record"), &[Refused]),
    test(DescriptorLimit, Phase::Import, &[Way::Import], (file!(gaudi "share_limits"), "an_importer_leaves_the_last_descriptors_to_the_application"), &[Refused]),
    test(DescriptorLimit, Export, &[Hca], (file!(e2e "ib_failures"), "a_process_with_few_descriptors_says_so_and_staging_takes_fewer"), &[Error]),
    test(DescriptorLimit, Phase::Import, &[Hca], (file!(e2e "ib_failures"), "a_process_with_few_descriptors_says_so_and_staging_takes_fewer"), &[Error]),
    test(DescriptorLimit, Phase::Relay, &[Way::Relay], (file!(gaudi "relay"), "an_owner_that_lacks_descriptors_says_so"), &[Error]),
    cell(MemlockLimit, Map, CARD, Play::Rules("hlthunk_host_memory_map fail:ENOMEM after={} times=0", &[0, 4]), &[FellBack, Ended], "OUT_OF_MEMORY"),
    test(MemlockLimit, Map, &[Hca], (file!(e2e "ib_failures"), "a_limit_on_locked_memory_leaves_gaudi_memory_direct"), &[Delivered]),
    test(ShortMessage, Phase::Import, &[Way::Import], (file!(gaudi "share_hostile"), "garbage_and_crowds_do_not_keep_the_broker_from_its_work"), &[Delivered]),
    test(ShortMessage, Phase::Relay, &[Way::Relay], ("plugin/gaudi/src/share/relay/service/tests.rs", "messages_that_are_cut_short_or_too_long_end_a_relay_with_the_reason"), &[Refused]),
    test(PeerKilled, Phase::Import, &[Way::Import], (file!(gaudi "share_ends"), "an_exporter_killed_at_any_point_leaves_nothing_behind"), &[Refused]),
    test(PeerKilled, Phase::Relay, &[Way::Relay], (file!(gaudi "relay"), "a_peer_that_is_killed_or_was_stopped_ends_every_job"), &[Error]),
    quick(cell(PeerKilled, InFlight, &[Staged, Way::Import, Way::Relay, Hca], Play::Killed, &[Error], "")),
    cell(PeerKilled, Teardown, &[Staged, Way::Import, Way::Relay, Hca], Play::KilledClosing(&[200, 310, 430, 570]), &[Error, Closed], ""),
    test(PeerStopped, Phase::Import, &[Way::Import], (file!(gaudi "share_ends"), "an_exporter_that_does_not_answer_is_not_asked_again_at_once"), &[Refused]),
    test(PeerStopped, Phase::Relay, &[Way::Relay], (file!(gaudi "relay"), "a_job_of_a_peer_that_is_stopped_goes_on_with_it"), &[Delivered]),
    cell(PeerStopped, InFlight, &[Staged, Way::Import, Way::Relay, Hca], Play::Stopped(30), &[Delivered], ""),
    cell(PeerStopped, Teardown, &[Staged, Way::Relay, Hca], Play::GivenUp, &[Closed], ""),
    test(PidReused, Phase::Import, &[Way::Import], (file!(gaudi "share_ends"), "a_process_that_got_the_number_of_an_ended_one_is_not_taken_for_it"), &[Refused]),
    test(PidReused, Phase::Relay, &[Way::Relay], (file!(gaudi "share_ends"), "a_process_that_got_the_number_of_an_ended_one_is_not_taken_for_it"), &[Refused]),
    quick(cell(DmaError, Submit, CARD, Play::Rules("hlthunk_command_submission fail:EIO after={} times=1", POINTS), &[Delivered], "")),
    cell(DmaError, Submit, STAGING, Play::Live("hlthunk_command_submission fail:EIO times=0"), &[Ended], "DMA_FAILED"),
    quick(cell(DmaError, Submit, IPC, Play::Live("hlthunk_command_submission fail:EIO times=0"), &[Error], "DMA_FAILED|CHANNEL_FAILED")),
    cell(DmaError, InFlight, STAGING, Play::Live("transfer fail:EIO times=0"), &[Ended], "DMA_FAILED"),
    cell(DmaError, InFlight, IPC, Play::Live("transfer fail:EIO times=0"), &[Error], "DMA_FAILED|CHANNEL_FAILED"),
    cell(DmaError, Completion, CARD, Play::Rules("hlthunk_wait_for_cs fail:EIO after={} times=1", POINTS), &[Delivered], ""),
    cell(DmaTimeout, InFlight, STAGING, Play::Live("submission hang times=0"), &[Ended], "TIMEOUT"),
    // The reset after a timeout also ends the copies queued behind it, and those end with EIO, not with ETIMEDOUT.
    cell(DmaTimeout, InFlight, IPC, Play::Live("submission hang times=0"), &[Error], "TIMEOUT|DMA_FAILED|CHANNEL_FAILED"),
    cell(DmaTimeout, Completion, STAGING, Play::Live("hlthunk_wait_for_cs fail:ETIMEDOUT times=0"), &[Ended], "TIMEOUT"),
    cell(DmaTimeout, Completion, IPC, Play::Live("hlthunk_wait_for_cs fail:ETIMEDOUT times=0"), &[Error], "TIMEOUT|CHANNEL_FAILED"),
    // The driver library spins while the driver's queue is full, so the call takes long.
    cell(QueueFull, Submit, CARD, Play::Rules("hlthunk_command_submission slow:300 after={} times=3", POINTS), &[Delivered], ""),
    cell(DeviceBusy, Open, ALL, Play::Rules("hlthunk_open fail:EBUSY times=0", ONCE), &[Error], "DEVICE_BUSY"),
    cell(DeviceReleased, Open, ALL, Play::Rules("hlthunk_open fail:EAGAIN times=3", ONCE), &[Delivered], ""),
    cell(Reset, Alloc, ALL, Play::Rules("hlthunk_device_memory_alloc reset", ONCE), &[Error], "DEVICE_BUSY"),
    cell(Reset, Map, CARD, Play::Rules("hlthunk_host_memory_map reset after={}", &[0, 2]), &[Ended], "DEVICE_BUSY|DMA_FAILED|CHANNEL_FAILED"),
    cell(Reset, Map, &[Hca], Play::Rules("hlthunk_device_memory_map reset", ONCE), &[Error], "DEVICE_BUSY"),
    cell(Reset, Export, &[Way::Import, Hca], Play::Rules("hlthunk_device_mapped_memory_export_dmabuf_fd reset\nhlthunk_device_memory_export_dmabuf_fd reset", ONCE), &[Ended], "DEVICE_BUSY|CHANNEL_FAILED"),
    cell(Reset, Phase::Import, &[Way::Import], Play::Rules("ioctl reset", ONCE), &[Ended], "DEVICE_BUSY|DMA_FAILED|CHANNEL_FAILED"),
    test(Reset, Phase::Relay, &[Way::Relay], (file!(gaudi "relay"), "a_card_that_is_lost_when_it_pins_the_ring_fails_the_job"), &[Error]),
    cell(Reset, Submit, STAGING, Play::Live("hlthunk_command_submission reset"), &[Ended], "DMA_FAILED"),
    cell(Reset, Submit, IPC, Play::Live("hlthunk_command_submission reset"), &[Error], "DMA_FAILED|CHANNEL_FAILED"),
    cell(Reset, InFlight, STAGING, Play::Live("transfer reset"), &[Ended], "DMA_FAILED"),
    quick(cell(Reset, InFlight, IPC, Play::Live("transfer reset"), &[Error], "DMA_FAILED|CHANNEL_FAILED")),
    test(Reset, InFlight, &[Hca], (file!(e2e "ib_failures"), "a_card_that_is_reset_under_a_registration_is_an_error_and_never_wrong_bytes"), &[Error]),
    cell(Reset, Completion, STAGING, Play::Live("hlthunk_wait_for_cs reset"), &[Ended], "DMA_FAILED"),
    cell(Reset, Completion, IPC, Play::Live("hlthunk_wait_for_cs reset"), &[Error], "DMA_FAILED|CHANNEL_FAILED"),
    cell(Reset, Teardown, FREED, Play::Rules("hlthunk_device_memory_free reset", ONCE), &[Delivered], ""),
    cell(Reset, Teardown, EXPORTED, Play::Rules("hlthunk_memory_unmap reset", ONCE), &[Delivered], ""),
    cell(Removed, Open, ALL, Play::Rules("hlthunk_open fail:ENODEV times=0", ONCE), &[Error], "DEVICE_NOT_FOUND"),
    cell(Removed, Alloc, ALL, Play::Rules("hlthunk_device_memory_alloc remove", ONCE), &[Error], "DEVICE_NOT_FOUND"),
    cell(Removed, Map, CARD, Play::Rules("hlthunk_host_memory_map remove after={}", &[0, 2]), &[Ended], "DEVICE_NOT_FOUND|DMA_FAILED|CHANNEL_FAILED"),
    cell(Removed, Map, &[Hca], Play::Rules("hlthunk_device_memory_map remove", ONCE), &[Error], "DEVICE_NOT_FOUND"),
    cell(Removed, Export, &[Way::Import, Hca], Play::Rules("hlthunk_device_mapped_memory_export_dmabuf_fd remove\nhlthunk_device_memory_export_dmabuf_fd remove", ONCE), &[Ended], "DEVICE_NOT_FOUND"),
    cell(Removed, Phase::Import, &[Way::Import], Play::Rules("ioctl remove", ONCE), &[Ended], "DEVICE_NOT_FOUND|DMA_FAILED|CHANNEL_FAILED"),
    test(Removed, Phase::Relay, &[Way::Relay], (file!(gaudi "relay"), "a_card_that_is_lost_when_it_pins_the_ring_fails_the_job"), &[Error]),
    cell(Removed, Submit, STAGING, Play::Live("hlthunk_command_submission remove"), &[Ended], "DEVICE_NOT_FOUND"),
    cell(Removed, Submit, IPC, Play::Live("hlthunk_command_submission remove"), &[Error], "DEVICE_NOT_FOUND|DMA_FAILED|CHANNEL_FAILED"),
    cell(Removed, InFlight, STAGING, Play::Live("transfer remove"), &[Ended], "DEVICE_NOT_FOUND|DMA_FAILED"),
    cell(Removed, InFlight, IPC, Play::Live("transfer remove"), &[Error], "DEVICE_NOT_FOUND|DMA_FAILED|CHANNEL_FAILED"),
    // A removal is noticed at the next driver call, and the HCA makes none: a copy before or after the HCA's transfer fails.
    cell(Removed, InFlight, &[Hca], Play::Rules("hlthunk_wait_for_cs remove after={}", &[1, 4]), &[Error, Ended], "DEVICE_NOT_FOUND|DMA_FAILED"),
    cell(Removed, Completion, STAGING, Play::Live("hlthunk_wait_for_cs remove"), &[Ended], "DEVICE_NOT_FOUND"),
    cell(Removed, Completion, IPC, Play::Live("hlthunk_wait_for_cs remove"), &[Error], "DEVICE_NOT_FOUND|DMA_FAILED|CHANNEL_FAILED"),
    cell(Removed, Teardown, FREED, Play::Rules("hlthunk_device_memory_free remove", ONCE), &[Delivered], ""),
    cell(Removed, Teardown, EXPORTED, Play::Rules("hlthunk_memory_unmap remove", ONCE), &[Delivered], ""),
    test(CorruptedKey, Phase::Import, &[Way::Import], (file!(gaudi "share_hostile"), "a_damaged_key_opens_nothing_else"), &[Refused]),
    test(CorruptedKey, Phase::Relay, &[Way::Relay], (file!(gaudi "relay"), "what_is_not_shared_under_the_key_is_refused_and_the_rest_goes_on"), &[Error]),
    test(VersionMismatch, Open, ALL, (file!(e2e "foreign"), "ucx_too_old_is_refused_in_one_line_that_names_versions"), &[Error]),
    test(VersionMismatch, Phase::Import, &[Way::Import], (file!(gaudi "share"), "keys_that_are_not_for_us_are_refused_with_the_reason"), &[Refused]),
    test(VersionMismatch, Phase::Relay, &[Way::Relay], (file!(gaudi "relay"), "a_message_of_another_version_is_refused_and_the_owner_goes_on"), &[Refused]),
    cell(MappingTable, Open, ALL, Play::Variables(&[("GAUDI_MAPPING_TABLE", "[{\"index\": 0, \"bus_id\"")]), &[Error], "GAUDI_MAPPING_TABLE"),
    quick(cell(SlowEngine, InFlight, CARD, Play::Rules("transfer slow:20 times=0", ONCE), &[Delivered], "")),
    // No rule of the software card plays this: a copy that UCX waits for, with no other copy behind it, would never end.
    test(OutOfOrder, Completion, CARD, ("plugin/gaudi/src/device/copy/reaping_tests.rs", "the_ends_of_one_queue_may_be_reported_in_any_order"), &[Delivered]),
    test(Unmapped, InFlight, &[Staged, Way::Import, Loopback], (file!(gaudi "rcache"), "memory_that_is_unmapped_under_a_copy_and_mapped_anew_is_not_the_copys"), &[Delivered]),
    test(Unmapped, InFlight, &[Way::Relay], (file!(gaudi "relay"), "host_memory_that_its_owner_has_taken_away_is_an_error_and_harms_nobody"), &[Error]),
    test(FullShm, Alloc, ALL, (file!(e2e "faults"), "a_full_dev_shm_is_named_as_the_reason_with_what_to_do"), &[Ended]),
    test(PortDown, InFlight, &[Hca], (file!(e2e "ib_failures"), "a_rail_that_stays_down_is_an_error_of_the_endpoint"), &[Error]),
    test(PortDown, InFlight, &[Hca], (file!(e2e "ib_failures"), "a_rail_that_fails_in_a_transfer_and_comes_back_loses_nothing"), &[Delivered]),
];
