//! `keys`: remote keys packed, unpacked and released.

use super::{Scene, Tally, process};
use crate::uct::Status;
use anyhow::Result;

/// What lies behind a key's bytes must stay.
const GUARD: u8 = 0xa5;

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let size = scene.domain.attributes()?.key_size;
    let memory = scene.domain.allocate(10_000, false)?;
    let host = vec![0u8; 10_000];
    let (device, start) = (memory.address(), host.as_ptr().addr() as u64);
    let of_device = scene.domain.register(device, 10_000, None)?;
    let of_host = scene.domain.register(start, 10_000, None)?;
    let sys_device = scene.domain.query(device, 1)?.sys_device;
    let descriptors = process::descriptors()?;
    for round in 0..1000 {
        for which in 0..3 {
            let mut buffer = vec![GUARD; size + 64];
            match which {
                0 => memory.pack(&mut buffer)?,
                1 => of_device.pack(device + 4096, 100, &mut buffer)?,
                _ => of_host.pack(start + 1, 100, &mut buffer)?,
            }
            let intact = buffer[size..].iter().all(|&byte| byte == GUARD);
            tally.expect(intact, || format!("key {which} is longer than {size} bytes"));
            let device = (round % 2 == 0).then_some(sys_device);
            let key = scene.domain.unpack(&buffer[..size], device);
            tally.expect(key.is_ok(), || format!("key {which} is not understood: {:?}", key.err()));
        }
    }
    let nothing = scene.domain.pack_nothing(size).err().map(|error| error.status);
    tally.equal(&nothing, &Some(Status::INVALID_PARAM), "a key of no memory");
    tally.equal(&process::descriptors()?, &descriptors, "descriptors after 3000 keys");
    println!("keys of {size} bytes");
    Ok(())
}
