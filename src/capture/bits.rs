//! Expert ids in Parquet, so many bits each: router choices are close to evenly spread, so that no compression makes up for
//! bits that are always zero.
//!
//! Id `i` is in bits `i * bits` to `(i + 1) * bits - 1` of the bytes, the lowest bit of each byte and of each id first. What
//! is left of the last byte is zero.

use bytes::Bytes;

use crate::record::{Routing, RoutingShape};

/// How many bits the largest id takes; one at least.
pub(super) fn needed(routing: &Routing) -> u32 {
    let largest = match routing.shape().dtype.bytes() {
        // All at once, where a number is a byte.
        1 => routing.data().iter().copied().max().map(u32::from),
        _ => routing.ids().max(),
    };
    let largest = largest.unwrap_or(0);
    (u32::BITS - largest.leading_zeros()).max(1)
}

/// How many bits the largest id takes, and all of them packed.
pub(super) fn pack(routing: &Routing) -> (u32, Vec<u8>) {
    let bits = needed(routing);
    if bits as usize == 8 * routing.shape().dtype.bytes() {
        return (bits, routing.data().to_vec());
    }
    let ids = routing.shape().ids().unwrap_or(0);
    let mut packed = Vec::with_capacity(packed_bytes(ids, bits).unwrap_or(0));
    let (mut waiting, mut count) = (0_u64, 0);
    for id in routing.ids() {
        waiting |= u64::from(id) << count;
        count += bits;
        if count >= u32::BITS {
            packed.extend_from_slice(&(waiting as u32).to_le_bytes());
            (waiting, count) = (waiting >> u32::BITS, count - u32::BITS);
        }
    }
    packed.extend_from_slice(&waiting.to_le_bytes()[..count.div_ceil(8) as usize]);
    (bits, packed)
}

/// The ids as the shape's type has them.
///
/// # Errors
/// They are not `bits` each, or do not fit into the type.
pub(super) fn unpack(shape: RoutingShape, bits: u32, packed: &[u8]) -> Result<Bytes, String> {
    let bytes = shape.dtype.bytes();
    let ids = shape.ids().ok_or("a routing is larger than memory")?;
    let is_whole = packed_bytes(ids, bits) == Some(packed.len());
    if !is_whole || bits == 0 || bits as usize > 8 * bytes {
        let (length, dtype) = (packed.len(), shape.dtype.as_str());
        return Err(format!("{length} bytes are not {ids} ids of {bits} bits, of type {dtype}"));
    }
    let mut data = Vec::with_capacity(ids * bytes);
    let (mut waiting, mut count, mut rest) = (0_u64, 0, packed.iter());
    let mask = u64::from(u32::MAX >> (u32::BITS - bits));
    for _ in 0..ids {
        while count < bits {
            waiting |= u64::from(rest.next().copied().unwrap_or(0)) << count;
            count += 8;
        }
        data.extend_from_slice(&((waiting & mask) as u32).to_le_bytes()[..bytes]);
        (waiting, count) = (waiting >> bits, count - bits);
    }
    if waiting == 0 { Ok(data.into()) } else { Err("the last byte has bits behind the last id".to_owned()) }
}

fn packed_bytes(ids: usize, bits: u32) -> Option<usize> {
    Some(ids.checked_mul(bits as usize)?.div_ceil(8))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{BinaryArray, RecordBatch, new_null_array};
    use arrow::datatypes::DataType;

    use super::*;
    use crate::capture::{decode, encode};
    use crate::record::{Call, LayerAxis, RoutingDtype, example};

    fn shape(rows: u32) -> RoutingShape {
        RoutingShape {
            start: 0,
            rows,
            layers: 3,
            layer_axis: LayerAxis::Unknown,
            top_k: 1,
            dtype: RoutingDtype::U8,
        }
    }

    #[test]
    fn ids_of_any_size_come_back_and_nothing_else_is_taken_for_them() {
        for most in [0, 1, 2, 7, 8, 127, 128, 255, 256, 1000, 65_535, 65_536, i32::MAX as u32] {
            for rows in [0, 1, 2, 7, 40] {
                let ids: Vec<u32> =
                    (0..3 * rows).map(|n: u32| n.wrapping_mul(2_654_435_761) % (most + 1)).collect();
                let ids: Vec<u32> = ids.into_iter().chain([most; 3]).take(3 * rows as usize).collect();
                let routing = Routing::pack(shape(rows), &ids).expect("so many ids");
                let (bits, packed) = pack(&routing);
                let shape = *routing.shape();
                assert!(packed.len() <= (ids.len() * bits as usize).div_ceil(8), "{most} {rows}");
                assert_eq!(unpack(shape, bits, &packed).as_ref(), Ok(routing.data()), "{most} {rows}");
                assert!(unpack(shape, bits, &[&packed[..], &[0]].concat()).is_err());
                assert!(packed.is_empty() || unpack(shape, bits, &packed[1..]).is_err());
                assert!(unpack(shape, 33, &packed).is_err());
            }
        }
        let routing = Routing::pack(shape(1), &[1, 5, 2]).expect("three ids");
        assert_eq!(pack(&routing), (3, vec![0b1010_1001, 0]));
        assert!(unpack(*routing.shape(), 3, &[0b1010_1001, 2]).is_err());
        assert!(unpack(*routing.shape(), 9, &[0; 4]).is_err(), "u8 holds 8 bits");
    }

    #[test]
    fn rows_from_before_they_were_packed_are_read() {
        let routing = Routing::pack(shape(2), &[1, 5, 2, 0, 7, 3]).expect("six ids");
        let call = Call { routing: Some(routing.clone()), ..example::call(serde_json::json!({})) };
        let batch = encode::batch(&[call]).expect("a row");
        let (schema, mut columns, _) = batch.into_parts();
        let at = |name: &str| schema.index_of(name).expect("a column");
        columns[at("routing")] = Arc::new(BinaryArray::from_iter([Some(routing.data())]));
        for has_column in [true, false] {
            let left = |&(at, _): &(usize, _)| has_column || schema.field(at).name() != "routing_bits";
            let left: Vec<usize> = columns.iter().enumerate().filter(left).map(|(at, _)| at).collect();
            let schema = Arc::new(schema.project(&left).expect("columns"));
            columns[at("routing_bits")] = new_null_array(&DataType::UInt32, 1);
            let columns = left.into_iter().map(|at| Arc::clone(&columns[at])).collect();
            let batch = RecordBatch::try_new(schema, columns).expect("a row");
            assert_eq!(decode::calls(&batch).expect("a call")[0].routing, Some(routing.clone()));
        }
    }
}
