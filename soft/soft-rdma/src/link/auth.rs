//! Proof that a peer knows the node's secret: HMAC-SHA-256 over two nonces.
//!
//! Both sides prove it, each with its own label, so that neither a listener nor a replayed message
//! helps anyone. What follows on the connection is neither encrypted nor signed: between hosts the
//! network must be trusted, as an InfiniBand fabric is.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The secret of a node or fabric.
pub(crate) type Secret = [u8; 32];

/// Which side proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The one that connected.
    Connecting,
    /// The one that accepted.
    Accepting,
}

fn mac(secret: &Secret, side: Side, accepting: &[u8; 32], connecting: &[u8; 32]) -> Hmac<Sha256> {
    let label: &[u8] = match side {
        Side::Connecting => b"soft-rdma 2 connecting",
        Side::Accepting => b"soft-rdma 2 accepting",
    };
    // HMAC pads a short key with zeros.
    let mut key = [0; 64];
    key[..secret.len()].copy_from_slice(secret);
    let mac = <Hmac<Sha256> as KeyInit>::new(&key.into());
    mac.chain_update(label).chain_update(accepting).chain_update(connecting)
}

/// The proof of one side, over the nonces of the accepting and of the connecting one.
pub(crate) fn prove(
    secret: &Secret,
    side: Side,
    accepting: &[u8; 32],
    connecting: &[u8; 32],
) -> [u8; 32] {
    mac(secret, side, accepting, connecting).finalize().into_bytes().into()
}

/// Whether this is the proof of that side.
pub(crate) fn is_proof(
    proof: &[u8; 32],
    secret: &Secret,
    side: Side,
    accepting: &[u8; 32],
    connecting: &[u8; 32],
) -> bool {
    mac(secret, side, accepting, connecting).verify(proof.into()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_depends_on_side_secret_and_nonces() {
        let proof = prove(&[1; 32], Side::Accepting, &[2; 32], &[3; 32]);
        let holds = |secret: [u8; 32], side, accepting: [u8; 32], connecting: [u8; 32]| {
            is_proof(&proof, &secret, side, &accepting, &connecting)
        };
        assert!(holds([1; 32], Side::Accepting, [2; 32], [3; 32]));
        assert!(!holds([1; 32], Side::Connecting, [2; 32], [3; 32]));
        assert!(!holds([0; 32], Side::Accepting, [2; 32], [3; 32]));
        assert!(!holds([1; 32], Side::Accepting, [3; 32], [2; 32]));
    }
}
