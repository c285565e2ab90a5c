import os

import django
from django.conf import settings
from django.db import connection, models, transaction

shop = {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}
settings.configure(DATABASES={"default": shop})
django.setup()


class Order(models.Model):
    stream_id = models.BigIntegerField(primary_key=True)
    total = models.IntegerField()

    class Meta:
        app_label, db_table, ordering = "shop", "orders", ["stream_id"]


class Invoice(models.Model):
    number = models.BigAutoField(primary_key=True)
    stream_id = models.BigIntegerField()
    total = models.IntegerField()

    class Meta:
        app_label, db_table = "shop", "invoices"


with connection.cursor() as cursor:
    cursor.execute("LISTEN tidemark_orders")
    while True:
        with transaction.atomic():
            cursor.execute("SELECT low, high, late FROM tidemark_reader.take('orders', 'billing')")
            ranges = cursor.fetchall()
            for low, high, late in ranges:
                new = models.Q(stream_id__gt=low, stream_id__lte=high) | models.Q(stream_id__in=late)
                for order in Order.objects.filter(new):
                    Invoice.objects.create(stream_id=order.stream_id, total=order.total)
        if not ranges:  # nothing is new
            list(connection.connection.notifies(timeout=10, stop_after=1))
