from __future__ import annotations

from shoal.cache.spec import FullAttention, bytes_per_token


def test_a_layer_keeps_keys_and_values_of_its_own_heads():
    """3 heads of 64 keys and 64 values in two bytes each."""
    layer = FullAttention(num_kv_heads=3, key_dim=64, value_dim=64, itemsize=2)
    assert layer.bytes_per_token == 3 * 128 * 2


def test_keys_and_values_may_differ_in_width():
    """Multi-head latent attention has wider keys than values."""
    assert (
        FullAttention(num_kv_heads=2, key_dim=192, value_dim=128, itemsize=4).bytes_per_token == 2 * 320 * 4
    )


def test_a_rank_is_the_sum_of_its_layers_and_may_keep_nothing():
    """Layers add up, and a rank without KV heads counts zero."""
    layer = FullAttention(num_kv_heads=1, key_dim=8, value_dim=8, itemsize=4)
    empty = FullAttention(num_kv_heads=0, key_dim=8, value_dim=8, itemsize=4)
    assert bytes_per_token([layer, empty, layer]) == 2 * 64
    assert bytes_per_token([]) == 0
